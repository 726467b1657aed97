// Files for a message. The server reads them, which knows PDF and DOCX; a text it need not read.

import * as api from "./api.js";
import {imageOf, isImage} from "./images.js";

const LARGEST = 20_000_000; // bytes of a file

/** {name, text}, and if the server has read it, isRead, pages and count, its tokens. */
export async function read(file, model) {
  if (file.size > LARGEST) throw new Error(`${file.name} has ${file.size} bytes; at most ${LARGEST} can be read here.`);
  if (isImage(file)) return imageOf(file);
  try {
    const {text, pages, n_tokens} = await api.document(model, file.name, await dataOf(file));
    return {name: file.name, text, pages, count: n_tokens, isRead: true};
  } catch (error) {
    if (error.status !== 404) throw error;
    const text = await file.text();
    if (/[\0\uFFFD]/.test(text)) throw new Error(`${file.name} is no text file.`);
    return {name: file.name, text}; // the server reads no documents, but this is a text
  }
}

const dataOf = file => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(new Error(`${file.name} cannot be read: ${reader.error.message}`));
  reader.readAsDataURL(file);
});
