// Pictures in messages, for models that see. A picture is a file of a message with `image`, a data URL, in place of a text.

import {html, nothing} from "./vendor/lit-html/lit-html.js";

const LONGEST = 2048; // pixels of a side: encoders see fewer
const LARGEST = 4_000_000; // characters of a PNG; a larger one is a photograph, which JPEG is made for

/** props: of /props. */
export const sees = props => Boolean(props?.modalities?.vision);

export const isImage = file => /^image\/(?!svg)/.test(file.type); // SVG is text

/** A file of a message. Drawn anew: upright, in a format and size that each server takes, and without the place where it was taken. */
export async function imageOf(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} is no picture that this browser can read.`);
  }
  const scale = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind what is transparent
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const png = file.type === "image/jpeg" ? "" : canvas.toDataURL("image/png");
  return {name: file.name, text: "", image: png && png.length <= LARGEST ? png : canvas.toDataURL("image/jpeg", .92)};
}

/** Refuses pictures that the model would not see. props: null where they are not known yet. */
export function check(files, props) {
  const found = files.find(file => file.image || (file instanceof File && isImage(file)));
  if (found && props && !sees(props)) throw new Error(`${found.name} is a picture, and this model does not see pictures.`);
}

/** The content of a message, with the pictures before the text. */
export const contentOf = (files, text) => {
  const parts = files.filter(file => file.image).map(({image}) => ({type: "image_url", image_url: {url: image}}));
  return parts.length ? [...parts, ...(text ? [{type: "text", text}] : [])] : text;
};

export const partsOf = content => typeof content === "string" ? [{type: "text", text: content}] : content;

export const joined = (a, b) =>
  typeof a === "string" && typeof b === "string" ? `${a}\n\n${b}` : [...partsOf(a), {type: "text", text: "\n\n"}, ...partsOf(b)];

/** The pictures of messages, in the order in which their places stand in the prompt. */
export const imagesOf = messages =>
  messages.flatMap(({content}) => partsOf(content)).filter(part => part.image_url).map(part => part.image_url.url.split(",")[1]);

export const picture = (file, props) => html`<figure><img class="picture" src=${file.image} alt=${file.name}>
  ${props && !sees(props) ? html`<figcaption class="quiet">This model does not see pictures.</figcaption>` : nothing}</figure>`;

export const small = file => file.image ? html`<img class="small" src=${file.image} alt="">` : nothing;
