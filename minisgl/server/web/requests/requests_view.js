/** The view Requests. */
export class RequestsView {
  constructor(root) {
    this._root = root;
  }
  show() {}
  hide() {}
}
