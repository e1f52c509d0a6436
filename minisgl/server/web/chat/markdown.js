/**
 * Markdown as DOM. HTML in it stays text, images become links, and only http, https and mailto links are links,
 * so that an answer can neither run nor fetch anything. The server's Content-Security-Policy says the same again.
 */

import highlight from "../vendor/highlight.js";
import MarkdownIt from "../vendor/markdown-it.js";
import { h, iconButton } from "../shared/dom.js";

const MAX_HIGHLIGHTED = 20000;
const SAFE_LINK = /^(https?:|mailto:|#)/i;

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: false });
markdown.validateLink = (url) => SAFE_LINK.test(url.trim());
markdown.renderer.rules.image = (tokens, place) => {
  const { attrs, content } = tokens[place];
  const source = markdown.utils.escapeHtml(attrs.find(([name]) => name === "src")[1]);
  const text = markdown.utils.escapeHtml(content || "image");
  return `<a class="image" href="${source}" target="_blank" rel="noopener noreferrer nofollow">${text}</a>`;
};
const plainLink = (tokens, place, options, _, self) => self.renderToken(tokens, place, options);
markdown.renderer.rules.link_open = (tokens, place, ...rest) => {
  tokens[place].attrSet("target", "_blank");
  tokens[place].attrSet("rel", "noopener noreferrer nofollow");
  return plainLink(tokens, place, ...rest);
};
// A style attribute would be refused by the Content-Security-Policy; a class says the same.
for (const cell of ["th_open", "td_open"])
  markdown.renderer.rules[cell] = (tokens, place, options, _, self) => {
    const token = tokens[place];
    const style = token.attrGet("style");
    token.attrs = style ? [["class", style.replace("text-align:", "to-")]] : null;
    return self.renderToken(tokens, place, options);
  };

/** The DOM of some Markdown. */
function render(text) {
  const template = document.createElement("template");
  template.innerHTML = markdown.render(text);
  for (const table of template.content.querySelectorAll("table")) {
    const frame = h("div.wide", { tabIndex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const code of template.content.querySelectorAll("pre > code")) frameCode(code);
  return template.content;
}

/** Colours, the language's name and a button to copy for a block of code. */
function frameCode(code) {
  const language = (/language-(\S+)/.exec(code.className) ?? [])[1] ?? "";
  const text = code.textContent;
  if (highlight.getLanguage(language) && text.length <= MAX_HIGHLIGHTED)
    // highlight.js escapes the text it is given.
    code.innerHTML = highlight.highlight(text, { language, ignoreIllegals: true }).value;
  const frame = h("div.code", {}, h("div.code-bar", {}, h("span", {}, language), copyButton("Copy this code", () => text)));
  code.parentElement.replaceWith(frame);
  frame.append(h("pre", { tabIndex: 0, role: "region", "aria-label": language ? `Code: ${language}` : "Code" }, code));
}

/** A button that copies what `text()` gives. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    await copy(text());
    button.classList.add("done");
    setTimeout(() => button.classList.remove("done"), 1200);
  });
  return button;
}

/** Put `text` on the clipboard. Browsers have `navigator.clipboard` on https and on localhost only. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = h("textarea.unseen", { value: text });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/**
 * A growing text, shown as Markdown, at a cost that follows what is new.
 *
 * Blocks that can't change any more stay as they are; only the last one is made again. `finish` makes all of it
 * again where an earlier block may depend on a later one (a link's address at the text's end).
 */
export class GrowingMarkdown {
  constructor() {
    this.element = h("div.markdown");
    this._fixed = 0;
    this._numFixedNodes = 0;
    this._text = "";
  }

  /** Show `text`, which begins with the text of the last call. */
  show(text) {
    if (!text.startsWith(this._text)) this._reset();
    this._text = text;
    const tail = text.slice(this._fixed);
    const start = lastBlock(tail);
    while (this.element.childNodes.length > this._numFixedNodes) this.element.lastChild.remove();
    if (start > 0) {
      this.element.append(render(tail.slice(0, start)));
      this._numFixedNodes = this.element.childNodes.length;
      this._fixed += start;
    }
    this.element.append(openFence(tail.slice(start)) ?? render(tail.slice(start)));
  }

  /** Show the whole text for good. */
  finish(text) {
    if (this._text !== text || /^ {0,3}\[[^\]]+\]:/m.test(text)) {
      this._reset();
      this.element.append(render(text));
      this._text = text;
      return;
    }
    const rest = text.slice(this._fixed);
    while (this.element.childNodes.length > this._numFixedNodes) this.element.lastChild.remove();
    this.element.append(render(rest));
  }

  _reset() {
    this.element.replaceChildren();
    this._fixed = 0;
    this._numFixedNodes = 0;
    this._text = "";
  }
}

/** Where the last block of the outermost level begins, in characters. */
function lastBlock(text) {
  const starts = markdown.parse(text, {}).filter((token) => token.level === 0 && token.map && token.nesting >= 0);
  const line = starts.at(-1)?.map[0] ?? 0;
  let place = 0;
  for (let left = line; left > 0; left--) place = text.indexOf("\n", place) + 1;
  return place;
}

/** A block of code whose end has not come, without colours, since it changes with each token. */
function openFence(text) {
  const fence = /^(`{3,}|~{3,})([^\n`]*)\n?/.exec(text);
  if (!fence) return null;
  const body = text.slice(fence[0].length);
  if (new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`, "m").test(body)) return null;
  const bar = h("div.code-bar", {}, h("span", {}, fence[2].trim()));
  return h("div.code", {}, bar, h("pre", {}, h("code", {}, body)));
}
