"use strict";
// Keeps the parts of a page as they are now: the server sends each part that has changed as HTML, by the id of its element.
// Without this file every page works as well; it shows then what was when it was opened.
(() => {
  const address = document.body.dataset.live;
  const state = document.getElementById("live-state");
  const RETRY_MS = 10000;
  let source = null;
  let retry = 0;
  let looks = 0;

  const say = (word) => {
    if (state) { state.hidden = false; document.getElementById("live-word").textContent = word; }
  };

  // What somebody is about to use or to copy must not change under them.
  const isInUse = (part) => {
    if (part !== document.activeElement && part.contains(document.activeElement)) return true;
    const selection = document.getSelection();
    return selection !== null && !selection.isCollapsed && selection.containsNode(part, true);
  };

  const late = new Map();
  const swap = (parts) => {
    for (const [id, html] of Object.entries(parts)) late.set(id, html);
    for (const [id, html] of late) {
      const part = document.getElementById(id);
      if (part && isInUse(part)) continue;
      if (part) part.innerHTML = html;
      late.delete(id);
    }
  };

  const open = () => {
    if (!address || source || document.hidden) return;
    clearTimeout(retry);
    source = new EventSource(address);
    source.addEventListener("look", (event) => {
      swap(JSON.parse(event.data));
      say("(live)");
      document.documentElement.dataset.looks = String(++looks);
    });
    source.addEventListener("away", () => say("(Redis does not answer)"));
    source.addEventListener("error", () => {
      say("(not live)");
      if (source && source.readyState === EventSource.CLOSED) { source = null; retry = setTimeout(open, RETRY_MS); }
    });
  };

  const close = () => {
    if (source) { source.close(); source = null; say("(not live)"); }
  };

  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);
  open();

  document.addEventListener("keydown", (event) => {
    const find = document.getElementById("find");
    const isText = event.target instanceof Element && event.target.closest("input, textarea, select, [contenteditable]");
    if (event.key === "/" && find && !isText && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      find.focus();
    }
  });
})();
