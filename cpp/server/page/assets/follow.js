// Following: the end of the talk stays in view while it grows, unless a person has scrolled up.

const NEAR = 40; // pixels from the end that count as the end

const page = document.documentElement;
let follows = true;
let last = 0; // where the page was

const below = () => page.scrollHeight - page.clientHeight - page.scrollTop;

addEventListener("scroll", () => {
  if (page.scrollTop < last - 1 && below() > 1) follows = false;
  else if (below() < NEAR) follows = true;
  last = page.scrollTop;
}, {passive: true});

/** After the talk has grown. */
export function grown() {
  if (!follows) return;
  page.scrollTop = page.scrollHeight;
  last = page.scrollTop;
}

/** From now on, whatever was looked at before. */
export function follow() {
  follows = true;
  grown();
}
