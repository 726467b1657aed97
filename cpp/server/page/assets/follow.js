// Following: the end of the talk stays in view while it grows, unless a person has scrolled up.

const NEAR = 40; // pixels from the end that count as the end

const page = document.documentElement;
let follows = true;
let last = 0; // where the page was
let changed = () => {}; // is called when isAway() has changed

const below = () => page.scrollHeight - page.clientHeight - page.scrollTop;

/** Whether a person has left the end. */
export const isAway = () => !follows && below() > NEAR;

export function watch(given) {
  changed = given;
}

addEventListener("scroll", () => {
  const before = follows;
  if (page.scrollTop < last - 1 && below() > 1) follows = false;
  else if (below() < NEAR) follows = true;
  last = page.scrollTop;
  if (follows !== before) changed();
}, {passive: true});

function toEnd() {
  page.scrollTop = page.scrollHeight;
  last = page.scrollTop;
}

/** From now on, whatever was looked at before. */
export function follow() {
  const before = follows;
  follows = true;
  toEnd();
  if (!before) changed();
}

/** After the talk has grown. */
export function grown() {
  if (follows) toEnd();
}
