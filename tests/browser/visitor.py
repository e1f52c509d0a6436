"""A person in front of the page."""

from collections.abc import Callable
from typing import Any

from playwright.sync_api import BrowserContext, Page, Route, expect
from running_server import RunningServer

Start = Callable[..., RunningServer]
"""Starts a server with these settings."""


class Visitor:
    """A page, with what it tried to fetch from elsewhere and what its console complained about."""

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self.page: Page = context.new_page()
        self.strayed: list[str] = []
        self.complaints: list[str] = []
        self.home = ""
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "console", lambda line: self.complaints.append(line.text) if line.type == "error" else None
        )
        context.route("**/*", self._watch)

    def _watch(self, route: Route) -> None:
        if route.request.url.startswith((self.home, "blob:")):
            route.continue_()
        else:
            self.strayed.append(route.request.url)
            route.abort()

    def open(self, server: RunningServer, view: str = "chat") -> Page:
        self.home = server.url("/")
        self.page.goto(f"{self.home}#{view}")
        return self.page

    def ask(self, text: str) -> None:
        self.page.fill("#composer", text)
        self.page.keyboard.press("Enter")

    def answer(self, text: str) -> Any:
        """Ask, wait until the answer is complete, and return its article."""
        before = self.page.locator(".message.assistant").count()
        self.ask(text)
        article = self.page.locator(".message.assistant").nth(before)
        expect(article.locator(".buttons")).to_be_visible()
        expect(self.page.locator(".log")).to_have_attribute("aria-busy", "false")
        return article
