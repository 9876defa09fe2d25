// Numbers as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(n: number): string {
  let unit = 0;
  let value = n;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${digits(value)} ${UNITS[unit]}`;
}

/** Three digits, no more than are needed. */
export function digits(n: number): string {
  const size = Math.abs(n);
  if (size === 0) return "0";
  if (size >= 100) return Math.round(n).toLocaleString("en");
  return String(Number(n.toPrecision(size >= 10 ? 3 : 2)));
}

export const count = (n: number) => Math.round(n).toLocaleString("en");
export const rate = (n: number) => `${digits(n)}/s`;
export const byteRate = (n: number) => `${bytes(n)}/s`;
export const percent = (n: number | null | undefined) => (n == null ? "–" : `${digits(n * 100)} %`);

export function micros(us: number | null | undefined): string {
  if (us == null || !Number.isFinite(us)) return "–";
  if (us < 1000) return `${digits(us)} µs`;
  if (us < 1e6) return `${digits(us / 1000)} ms`;
  return `${digits(us / 1e6)} s`;
}

export function seconds(s: number): string {
  if (s < 60) return `${Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export const clock = (ms: number) => new Date(ms).toLocaleString("sv", { timeZoneName: undefined });

/** A size as it is typed: `4K`, `1.5G`; `null` if it is none. */
export function parseSize(text: string): number | null {
  const found = /^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*$/i.exec(text);
  if (!found) return null;
  const power = "KMGT".indexOf((found[2] ?? "").toUpperCase()) + 1;
  const value = Number(found[1]) * (found[2] ? 1024 ** power : 1);
  return Number.isSafeInteger(Math.round(value)) ? Math.round(value) : null;
}

/** A size as `parseSize` takes it. */
export function typedSize(n: number): string {
  for (const [power, letter] of [[4, "T"], [3, "G"], [2, "M"], [1, "K"]] as const) {
    const unit = 1024 ** power;
    if (n >= unit && n % (unit / 4) === 0) return `${n / unit}${letter}`;
  }
  return String(n);
}
