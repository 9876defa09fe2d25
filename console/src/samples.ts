// Rates between two answers, from counters that only grow. Charts keep the answers of a quarter of an hour.
import { useEffect, useState } from "preact/hooks";
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

interface Taken {
  /** Seconds since 1970. */
  at: number;
  /** Seconds since the daemon started. */
  uptime: number;
}

/** Counters of one disk, or of all disks together. */
export interface Sample extends Taken {
  counters: Counters;
  /** Microseconds of a read without the cache, in the last five minutes. */
  without: number | null;
}

/** Counters of each disk. */
export interface Each extends Taken {
  disks: Map<string, Counters>;
}

/** A quarter of an hour at one in two seconds. */
const KEPT = 450;
/** Answers over which the present rate is taken, so that it does not flicker. */
const LATELY = 4;

const NONE = {} as Counters;

const find = (spans: DiskStats["spans"], name: string) => spans.find((s) => s.span === name);

/** Samples of an answer that is asked for repeatedly. Those from before a restart of the daemon are dropped. */
function useSamples<A, T extends Taken>(answer: A | null, sample: (answer: A) => T, most: number): T[] {
  const [all, set] = useState<T[]>([]);
  useEffect(() => {
    if (answer === null) return;
    const newest = sample(answer);
    set((was) => {
      const last = was[was.length - 1];
      const restarted = last && newest.uptime < last.uptime;
      return [...(restarted ? [] : was), newest].slice(-most);
    });
  }, [answer]);
  return all;
}

const one = (spans: DiskStats["spans"]): Sample => {
  const total = find(spans, "total");
  return {
    at: Date.now() / 1000,
    uptime: total?.seconds ?? 0,
    counters: total?.counters ?? NONE,
    without: find(spans, "5min")?.ratios.uncached_read_us ?? null,
  };
};

const each = ({ uptime, disks }: Stats): Each => ({
  at: Date.now() / 1000,
  uptime,
  disks: new Map(disks.map((d) => [d.name, find(d.spans, "total")?.counters ?? NONE])),
});

export const useOne = (spans: DiskStats["spans"] | null) => useSamples(spans, one, KEPT);
export const useEach = (stats: Stats | null) => useSamples(stats, each, LATELY);

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

/** Rates between each two samples. */
export function series(all: Sample[]): Series {
  const out: Series = { at: [], of: [], without: [] };
  for (let i = 1; i < all.length; i++) {
    const before = all[i - 1]!;
    const after = all[i]!;
    out.at.push(after.at);
    out.of.push(rates(before.counters, after.counters, after.at - before.at));
    out.without.push(after.without);
  }
  return out;
}

/** The present rate of the counters that `pick` takes from a sample. */
export function now<T extends Taken>(all: T[], pick: (sample: T) => Counters | undefined): Rates | null {
  const after = all[all.length - 1];
  const before = all[Math.max(0, all.length - LATELY)];
  if (!after || !before || after === before) return null;
  return rates(pick(before), pick(after), after.at - before.at);
}
