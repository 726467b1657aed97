// What the page looks like: the state as elements. Templates alone: what a click does is in main.js.

import {html, nothing} from "./vendor/lit-html/lit-html.js";
import {live} from "./vendor/lit-html/directives/live.js";
import {repeat} from "./vendor/lit-html/directives/repeat.js";
import {hasTexts, THINK} from "./answers.js";
import {pcdDialog, settingsDialog, tokenDialog} from "./dialogs.js";
import {documentDialog} from "./documents.js";
import {markdown} from "./markdown.js";
import {error, icon, select} from "./parts.js";
import {labelOf} from "./settings.js";
import {sidebar} from "./sidebar.js";
import {replaced, shown} from "./tokens.js";
import {picture, small} from "./images.js";

export function page(state, act) {
  const {conversation, settings, props} = state;
  return html`
    ${sidebar(state, act)}
    <div class="page">
      <header>
        ${state.isWide ? nothing : html`<button class="bare" aria-label="Conversations" @click=${() => act.panel("conversations")}>${icon("menu")}</button>`}
        <h1>pypcd</h1>
        <label><span class="quiet name">Model</span> ${select(state.models.map(({id}) => [id, id]), settings.model, value => act.set("model", value))}</label>
        <button class="pcd" @click=${() => act.panel("pcd")}><span class="quiet">PCD:</span> ${props ? labelOf(settings, props.pcd) : "…"} ${icon("down")}</button>
        <button class="bare" aria-label="Settings" title="Settings" @click=${() => act.panel("settings")}>${icon("gear")}</button>
      </header>
      <main>
        ${conversation.messages.size ? nothing : welcome(state)}
        ${talk(state, act)}
      </main>
      ${composer(state, act)}
    </div>
    <p class="unseen" role="status">${state.said}</p>
    ${settingsDialog(state, act)} ${pcdDialog(state, act)} ${tokenDialog(state, act)} ${documentDialog(state, act)}`;
}

function welcome({props, settings}) {
  const refusal = props?.pcd?.refusal;
  return html`<div class="welcome">
    <h2>What would you like to know?</h2>
    <ul>
      <li>Ask something, or drop a long text here and ask about it.</li>
      <li>“Compare” answers plainly and with PCD, side by side.</li>
      <li>“Tokens” under an answer shows what PCD did at each step.</li>
    </ul>
    ${settings.model === "demo" ? html`<p>The model “demo” looks values up in a JSON object and knows nothing else: paste one, and ask for the value of a key.</p>` : nothing}
    ${refusal ? html`<p>PCD is off: ${refusal}.</p>` : nothing}
    <p class="quiet">Conversations are kept in this browser alone. Programs find the model under ${new URL("v1", location.href).href}.</p>
  </div>`;
}

// -- the talk --------------------------------------------------------------------------------------------------------

function talk(state, act) {
  const pair = state.conversation.pair();
  const path = state.conversation.path();
  const single = pair ? path.slice(0, -1) : path;
  return html`<section class="talk" aria-label="Conversation">
    ${repeat(single, message => message.id, message => message.role === "user" ? yours(message, state, act) : answer(message, state, act))}
    ${pair && html`<div class="pair" role="group" aria-label="Comparison">
      ${repeat(pair, message => message.id, message => answer(message, state, act, titleOf(message, pair)))}
    </div>`}
  </section>`;
}

function titleOf({pcd, replay, setting}, [one, other]) {
  if (one.replay !== other.replay) return replay ? "With replay" : "Without replay";
  return pcd ? `With PCD (${setting})` : "Without PCD";
}

/** On a telephone about 40 characters are a line, and 10 lines are shown: what scrolls has to be reachable by keyboard. */
const mayScroll = text => text.length + 40 * text.split("\n").length > 350;

function yours(message, state, act) {
  const editing = state.editing?.id === message.id;
  return html`<article class="yours" aria-label="You">
    ${editing ? html`
      ${files(state.editing, act)}
      <textarea id="edit" aria-label="Edit message" rows="4" .value=${live(state.editing.text)}
        @input=${event => act.retype(event.target.value)} @keydown=${event => {
          if (event.key !== "Escape") return;
          event.stopPropagation(); // else it would stop an answer too
          act.edit(null);
        }}></textarea>
      <div class="tools"><button class="first" @click=${() => act.sendAgain(message)}>Send again</button><button @click=${() => act.edit(null)}>Cancel</button></div>`
    : html`
      ${message.files?.map(file => file.image ? picture(file, state.props) : html`<button class="open" @click=${() => act.read(file)}>${icon("file")} ${file.name}</button>`)}
      <div class="text" tabindex=${mayScroll(message.text) ? 0 : nothing}>${message.text}</div>
      <div class="tools">
        ${versions(message, state, act)}
        <button id=${"edit-" + message.id} @click=${() => act.edit(message)}>Edit</button>
        ${copyButton(message, act)}
        ${message.id === state.conversation.at ? html`<button @click=${() => act.retry(message)}>Retry</button>` : nothing}
      </div>`}
  </article>`;
}

/** For a moment it says what it did. */
const copyButton = (message, act) => html`<button aria-label="Copy" @click=${({currentTarget}) => act.copy(message.text, currentTarget)}>Copy</button>`;

/** title: of one of two that are compared. */
function answer(message, state, act, title = "") {
  const writing = state.runs.has(message.id);
  const asTokens = state.asTokens.has(message.id);
  return html`<article class="answer" aria-label=${title || "Answer"} aria-busy=${writing}>
    ${title && html`<h2>${title}</h2>`}
    ${asTokens ? tokens(message, act) : text(message, act)}
    ${writing && !message.text ? html`<p class="quiet reading">${reading(message)}</p>` : nothing}
    <div class="tools">
      ${title ? html`<button ?disabled=${writing} @click=${() => act.choose(message)}>Go on with this</button>`
        : versions(message, state, act)}
      <button aria-pressed=${asTokens} @click=${() => act.tokens(message)}>Tokens</button>
      ${copyButton(message, act)}
      ${title ? nothing : html`<button ?disabled=${writing} @click=${() => act.retry(message)}>Retry</button>`}
      ${!writing && !["stop", "full"].includes(message.ended) && message.tokens.length && !title
        ? html`<button @click=${() => act.goOn(message, message.tokens.length)}>Continue</button>` : nothing}
    </div>
    <p class="quiet">${told(message, writing, Boolean(title))}</p>
    ${passages(message, act)}
  </article>`;
}

function versions(message, state, act) {
  const all = state.conversation.versions(message);
  if (all.length < 2) return nothing;
  const at = all.indexOf(message);
  return html`<span class="versions" id=${"versions-" + message.id}>
    <button aria-label="Previous version" ?disabled=${at === 0} @click=${() => act.version(all[at - 1], "Previous version")}>‹</button>
    ${at + 1} of ${all.length}
    <button aria-label="Next version" ?disabled=${at === all.length - 1} @click=${() => act.version(all[at + 1], "Next version")}>›</button>
  </span>`;
}

const ENDS = {limit: "ended at the longest answer", full: "the context is full", stopped: "stopped", lost: "broken off"};

/** isCompared: without its speed, since the second of two finds the prompt in the cache, and PCD is not what made it faster. */
function told(message, writing, isCompared) {
  const {stats, ended} = message;
  if (!stats) return writing || !ended ? "" : ENDS[ended] ?? "";
  const n = Math.max(message.tokens.reduce((sum, token) => sum + token.n, 0), stats.written); // with its end, as the server counts
  return [
    ended === "stop" && !message.text ? "the model ended at once" : tokensIn(n),
    isCompared || n < 2 || !message.text ? "" : `${stats.perSecond.toFixed(1)} per second`,
    stats.did, ENDS[ended],
  ].filter(Boolean).join(" · ");
}

/** What was read of the files, if not all, and what was not; and the passages that the question is about, each with where it stands. */
function passages(message, act) {
  const {passages = [], note, documents, leftOut} = message.stats ?? {};
  const said = [documents && `Read ${documents}.`, leftOut && `${leftOut}.`, !passages.length && note && `No passage was read again: ${note}.`];
  const read = said.filter(Boolean).map(text => html`<p class="quiet">${text}</p>`);
  if (!passages.length) return read;
  return html`${read}<details class="passages quiet"><summary>${passages.length === 1 ? "1 passage" : `${passages.length} passages`}</summary>
    ${passages.map(passage => html`<figure title="Show it in the text" @click=${() => getSelection().isCollapsed && act.passage(message, passage)}>
      <figcaption><button>${passage.document}, ${passage.place}</button></figcaption>
      <blockquote class="text" tabindex="0">${passage.text}</blockquote></figure>`)}</details>`;
}

// -- an answer as text or as tokens -----------------------------------------------------------------------------------

const texts = new WeakMap(); // message -> {n, element}

function text(message, act) {
  const known = texts.get(message);
  if (known?.n === message.text.length) return known.element;
  const element = markdown((message.thinks ? THINK : "") + message.text, act.copy, known?.element);
  texts.set(message, {n: message.text.length, element});
  return element;
}

function tokens(message, act) {
  const button = (token, i) => html`<button class=${"token" + (replaced(token) ? " changed" : "") + (token.chosen ? " chosen" : "")}
    tabindex=${i ? -1 : 0} aria-label=${/\S/.test(token.text) ? nothing : shown(token)}
    aria-description=${token.chosen ? "chosen by you" : replaced(token) ? "changed by PCD" : nothing}
    @click=${() => act.open(message, i)}>${token.text.replaceAll("\n", "↵") || "∎"}</button>${[...token.text.matchAll(/\n/g)].map(() => html`<br>`)}`;
  // on one line: white space between elements would be seen here
  return html`<div class="tokens" role="group" aria-label="Tokens; arrow keys move, Enter opens" @keydown=${move}>${message.tokens.map(button)}</div>
    <p class="quiet">Click a token to see what else the model might have said.</p>`;
}

const STEPS = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity};

/** One token can be reached by Tab, the others from it. */
function move(event) {
  const all = [...event.currentTarget.querySelectorAll(".token")];
  const from = all.indexOf(document.activeElement);
  if (from < 0 || !(event.key in STEPS) || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  const to = all[Math.max(0, Math.min(all.length - 1, from + STEPS[event.key]))];
  all[from].tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
}

// -- the next message --------------------------------------------------------------------------------------------------

function composer(state, act) {
  const {draft, conversation} = state;
  const busy = [...state.runs.values()].some(run => run.conversation === conversation);
  return html`<div class="composer">
    ${state.panel || state.open || state.document ? nothing : error(state, act)}
    <form class="box" @submit=${event => { event.preventDefault(); act.send() }}>
      ${files(draft, act)}
      <label class="unseen" for="message">Message</label>
      <textarea id="message" rows="1" placeholder=${conversation.pair() ? "Goes on with the second answer" : "Message, or drop a file"} .value=${live(draft.text)} @input=${event => act.type(event.target.value)}
        @paste=${act.paste}
        @keydown=${event => {
          if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
          event.preventDefault();
          act.send();
        }}></textarea>
      <div class="tools">
        <button type="button" class="bare" aria-label="Attach files" title="Attach files" @click=${event => event.currentTarget.nextElementSibling.click()}>${icon("clip")} <span class="name">Attach files</span></button>
        <input type="file" multiple hidden @change=${event => { act.attach([...event.target.files]); event.target.value = "" }}>
        ${busy ? html`<button type="button" id="stop" @click=${() => act.stop()}>Stop</button>`
          : html`${hasTexts([...conversation.path(), draft]) ? html`<button type="button" @click=${act.compareReplay}>Compare replay</button>` : nothing}
            <button type="button" @click=${act.compare}>Compare</button><button class="first">Send</button>`}
      </div>
    </form>
    <div class="status quiet">${state.loading ? html`<progress aria-label="Loading"></progress> loading ${state.loading}`
      : state.reading ? html`<progress aria-label="Reading a file"></progress> reading ${state.reading}` : used(state)}</div>
  </div>`;
}

/** of: a message that is not sent yet. */
function files(of, act) {
  return of.files.length ? html`<ul class="files" aria-label="Files">${of.files.map(file => html`<li><span>${file.image ? small(file) : icon("file")} ${file.name}</span>
    ${file.count ? html`<span class="quiet">(${tokensIn(file.count)})</span>` : nothing}
    <button type="button" class="bare" aria-label=${`Remove ${file.name}`} @click=${() => act.detach(of, file)}>${icon("cross")}</button></li>`)}</ul>` : nothing;
}

export const grouped = new Intl.NumberFormat("en");
const tokensIn = n => `${grouped.format(n)} ${n === 1 ? "token" : "tokens"}`;

function used({conversation, draft, props}) {
  const size = props?.default_generation_settings?.n_ctx;
  const stats = conversation.path().findLast(message => message.stats)?.stats;
  const n = (stats ? stats.read + stats.cached + stats.written : 0) + draft.files.reduce((sum, file) => sum + (file.count ?? 0), 0);
  return size ? html`<span>${grouped.format(n)} of ${tokensIn(size)}${n > size ? ": parts of the files will be read" : ""}</span>` : nothing;
}

/** How far the prompt of an answer is read: the server reports it after each batch. */
function reading({progress}) {
  if (!progress) return html`<progress aria-label="Reading"></progress> begins`;
  const {total, cache, processed, time_ms} = progress;
  const left = time_ms / 1000 * (total - processed) / (processed - cache);
  return html`<progress aria-label="Reading" max=${total - cache} value=${processed > cache ? processed - cache : nothing}></progress>
    reading ${tokensIn(total)}${left > 0 && left < Infinity ? `, about ${Math.ceil(left)} s left` : ""}`;
}
