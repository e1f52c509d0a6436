/** Keeps conversations in the browser's own database, so that they outlive the tab. Nothing leaves the browser. */

const STORE = "conversations";
let opening = null;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("minisgl", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

async function run(mode, work) {
  const transaction = (await database()).transaction(STORE, mode);
  const request = work(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

/** All conversations, the one that was changed last first. */
export async function loadAll() {
  const all = await run("readonly", (store) => store.getAll());
  return all.sort((one, other) => other.changed - one.changed);
}

/** Keep this state of a conversation. */
export function save(conversation) {
  return run("readwrite", (store) => store.put(structuredClone(conversation)));
}

/** Forget a conversation. */
export function remove(id) {
  return run("readwrite", (store) => store.delete(id));
}
