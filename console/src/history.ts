// What the second service remembers of a disk, or of all: columns of sums, one for each slot of time. Made into the
// same series as what this page has seen itself, so that both are drawn by the same charts.
import type { Rates, Series } from "./samples";

export interface History {
  /** Seconds of a slot. */
  step: number;
  /** When each began, in seconds since 1970. */
  at: number[];
  /** Seconds of each that were seen. */
  seconds: number[];
  columns: Record<string, number[]>;
}

/** As far back as is kept, finely and less so. */
export const RANGES = [
  { name: "hour", since: 3600 },
  { name: "2 hours", since: 7200 },
  { name: "2 days", since: 2 * 86400 },
  { name: "14 days", since: 14 * 86400 },
  { name: "90 days", since: 90 * 86400 },
] as const;

/** So many points are drawn; more are no better on a screen. */
const POINTS = 480;
/** With fewer requests to the origin, what it takes is not told from these alone. */
const ENOUGH = 16;

export const historyPath = (since: number, disk?: string) =>
  `/v1/history?since=${since}&points=${POINTS}${disk === undefined ? "" : `&disk=${encodeURIComponent(disk).replace(/[!'()*~]/g, (c) => `%${c.charCodeAt(0).toString(16)}`)}`}`;

export function past({ step, at, seconds, columns }: History): Series {
  const column = (name: string) => columns[name] ?? [];
  const [reads, hits, writes] = [column("reads"), column("read_hits"), column("writes")];
  const [hitBytes, missBytes, written] = [column("read_hit_bytes"), column("read_miss_bytes"), column("write_bytes")];
  const [readUs, writeUs, origin, originUs] = [column("read_us"), column("write_us"), column("origin_reads"), column("origin_read_us")];
  const sum = (all: number[]) => all.reduce((a, b) => a + b, 0);
  const [all, allUs] = [sum(origin), sum(originUs)];
  const out: Series = { at: [], of: [], without: [] };
  at.forEach((start, i) => {
    const before = at[i - 1];
    // Where nothing was seen there is no line.
    if (before !== undefined && start - before > step * 1.5) {
      out.at.push(before + step);
      out.of.push(null);
      out.without.push(null);
    }
    const [r, w, s] = [reads[i] ?? 0, writes[i] ?? 0, seconds[i] ?? 0];
    const rates: Rates | null =
      s > 0
        ? {
            reads: r / s,
            writes: w / s,
            readBytes: ((hitBytes[i] ?? 0) + (missBytes[i] ?? 0)) / s,
            writeBytes: (written[i] ?? 0) / s,
            hitRatio: r > 0 ? (hits[i] ?? 0) / r : null,
            readUs: r > 0 ? (readUs[i] ?? 0) / r : null,
            writeUs: w > 0 ? (writeUs[i] ?? 0) / w : null,
          }
        : null;
    const [n, us] = (origin[i] ?? 0) >= ENOUGH ? [origin[i]!, originUs[i] ?? 0] : [all, allUs];
    out.at.push(start);
    out.of.push(rates);
    out.without.push(r > 0 && n >= ENOUGH ? us / n : null);
  });
  return out;
}
