/** The view Engine. */
export class EngineView {
  constructor(root) {
    this._root = root;
  }
  show() {}
  hide() {}
}
