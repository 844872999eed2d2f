// A table or a block of code that is wider than its page scrolls by the keyboard too.
const SCROLLING =
  ".md-typeset__scrollwrap, .md-typeset__table, .md-typeset pre > code, .md-sidebar__scrollwrap";

function reach() {
  for (const each of document.querySelectorAll(SCROLLING)) {
    if (each.scrollWidth > each.clientWidth || each.scrollHeight > each.clientHeight) {
      each.tabIndex = 0;
    } else {
      each.removeAttribute("tabindex");
    }
  }
}

document.addEventListener("DOMContentLoaded", () => {
  new MutationObserver(reach).observe(document.body, { childList: true, subtree: true });
  addEventListener("resize", reach);
  reach();
});
