/* The tables that test_modules.py has written. */
import { readFileSync } from "node:fs";
import { Table } from "viz/table.js";

export const read = (name) => {
  const { buffer, byteOffset, byteLength } = readFileSync(`${process.env.LANES}/${name}.bin`);
  return new Table(buffer.slice(byteOffset, byteOffset + byteLength));
};
export const names = (table, operations) => [...operations].map((i) => table.instruction(i));
export const find = (table, text) => table.kind.findIndex((_, i) => table.instruction(i) === text);
