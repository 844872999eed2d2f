// A table or a block of code that is wider than its page scrolls by the keyboard too.
document.addEventListener("DOMContentLoaded", () => {
  const reach = () => {
    for (const each of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset__table, .md-typeset pre > code, .md-sidebar__scrollwrap")) {
      each.tabIndex = 0;
    }
  };
  new MutationObserver(reach).observe(document.body, { childList: true, subtree: true });
  reach();
});
