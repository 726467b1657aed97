// Files for a message. The server reads them, which knows PDF, DOCX and more.

import * as api from "./api.js";
import {imageOf, isImage} from "./images.js";

const LARGEST = 20_000_000; // bytes of a file

/** {name, text, pages, unit, note, count}; note: what is left out; count: of its tokens. */
export async function read(file, model) {
  if (file.size > LARGEST) throw new Error(`${file.name} has ${file.size} bytes; at most ${LARGEST} can be read here.`);
  if (isImage(file)) return imageOf(file);
  const {text, pages, unit, note, n_tokens} = await api.document(model, file.name, await dataOf(file));
  return {name: file.name, text, pages, unit, note, count: n_tokens};
}

const dataOf = file => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(new Error(`${file.name} cannot be read: ${reader.error.message}`));
  reader.readAsDataURL(file);
});
