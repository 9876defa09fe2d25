// Counters only grow; what people want to see is how fast. So two answers are kept apart in time, and the last
// quarter of an hour of them for the charts.
import type { Counters, DiskStats, Stats } from "./api";

export interface Rates {
  reads: number;
  writes: number;
  readBytes: number;
  writeBytes: number;
  /** Share of reads that were hits; null if nothing was read. */
  hitRatio: number | null;
  readUs: number | null;
  writeUs: number | null;
}

export interface Sample {
  /** Seconds since 1970. */
  at: number;
  uptime: number;
  pool: Counters;
  poolWithout: number | null;
  disks: Map<string, Counters>;
  /** What a read takes without the cache, in the last five minutes. */
  without: Map<string, number | null>;
}

/** A quarter of an hour at one in two seconds. */
const KEPT = 450;

const NONE = {} as Counters;

export const total = (disk: { spans: DiskStats["spans"] }): Counters =>
  disk.spans.find((s) => s.span === "total")?.counters ?? NONE;

export function sample(stats: Stats): Sample {
  const find = (name: string) => stats.pool.disks.find((s) => s.span === name);
  return {
    at: Date.now() / 1000,
    uptime: stats.uptime,
    pool: find("total")?.counters ?? NONE,
    poolWithout: find("5min")?.ratios.uncached_read_us ?? null,
    disks: new Map(stats.disks.map((d) => [d.name, total(d)])),
    without: new Map(stats.disks.map((d) => [d.name, d.spans.find((s) => s.span === "5min")?.ratios.uncached_read_us ?? null])),
  };
}

/** The samples with a newer one; those of before a restart of the daemon are of no use. */
export function added(all: Sample[], newest: Sample): Sample[] {
  const last = all[all.length - 1];
  const restarted = last && newest.uptime < last.uptime;
  return [...(restarted ? [] : all), newest].slice(-KEPT);
}

const sum = (c: Counters, ...names: (keyof Counters)[]) => names.reduce((all, n) => all + (c[n] ?? 0), 0);

export function rates(before: Counters | undefined, after: Counters | undefined, seconds: number): Rates | null {
  if (!before || !after || seconds <= 0) return null;
  const grown = (...names: (keyof Counters)[]) => Math.max(0, sum(after, ...names) - sum(before, ...names));
  const hits = grown("read_hits");
  const reads = grown("read_hits", "read_partial_hits", "read_misses");
  const writes = grown("write_hits", "write_partial_hits", "write_misses");
  return {
    reads: reads / seconds,
    writes: writes / seconds,
    readBytes: grown("read_hit_bytes", "read_miss_bytes") / seconds,
    writeBytes: grown("write_bytes") / seconds,
    hitRatio: reads > 0 ? hits / reads : null,
    readUs: reads > 0 ? grown("read_ns") / reads / 1000 : null,
    writeUs: writes > 0 ? grown("write_ns") / writes / 1000 : null,
  };
}

export interface Series {
  at: number[];
  of: (Rates | null)[];
  without: (number | null)[];
}

/** Rates between each two samples, of the pool or of one disk. */
export function series(all: Sample[], disk?: string): Series {
  const out: Series = { at: [], of: [], without: [] };
  for (let i = 1; i < all.length; i++) {
    const before = all[i - 1]!;
    const after = all[i]!;
    const pick = (s: Sample) => (disk === undefined ? s.pool : s.disks.get(disk));
    out.at.push(after.at);
    out.of.push(rates(pick(before), pick(after), after.at - before.at));
    out.without.push(disk === undefined ? after.poolWithout : (after.without.get(disk) ?? null));
  }
  return out;
}

/** What it is now: over the last two or three samples, so that it does not flicker. */
export function now(all: Sample[], disk: string): Rates | null {
  const after = all[all.length - 1];
  const before = all[Math.max(0, all.length - 4)];
  if (!after || !before || after === before) return null;
  return rates(before.disks.get(disk), after.disks.get(disk), after.at - before.at);
}
