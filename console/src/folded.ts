// The files of a datastore in one row: what they do together.
import { useEffect, useRef, useState } from "preact/hooks";
import { call, type Datastore, type Schemas } from "./api";
import { FILES_MOST, storePath } from "./pages/datastores";
import { rates, type Rates } from "./samples";

type File = Schemas["FileReport"];
type Counters = Schemas["Counters"];

export interface Folded {
  size: number;
  cached: number;
  /** Between the last two looks. */
  rates: Rates | null;
  /** Over five minutes, or since the page was opened. */
  lately: Rates | null;
}

/** Between two looks: a list of files is longer than a figure. */
const EVERY = 5000;
/** Seconds for which looks are kept. */
const LATELY = 300;

function summed(files: File[]): Counters {
  const all = {} as Record<string, number>;
  for (const file of files) {
    for (const [name, value] of Object.entries(file.counters)) all[name] = (all[name] ?? 0) + (value as number);
  }
  return all as unknown as Counters;
}

/** All datastores by name, as far as they have few enough files to be asked for all of them. */
export function useFolded(stores: Datastore[] | null): Map<string, Folded> {
  const [folded, set] = useState<Map<string, Folded>>(new Map());
  const before = useRef(new Map<string, { at: number; counters: Counters }[]>());
  const names = (stores ?? [])
    .filter((s) => s.disks > 0 && s.disks <= FILES_MOST)
    .map((s) => s.name)
    .join("\n");
  useEffect(() => {
    let over = false;
    let timer = 0;
    const look = async () => {
      const found = new Map<string, Folded>();
      for (const name of document.hidden ? [] : names.split("\n").filter(Boolean)) {
        try {
          const files = await call<File[]>(storePath(name, "/files"), { passive: true });
          const counters = summed(files);
          const at = Date.now() / 1000;
          const looks = (before.current.get(name) ?? []).filter((look) => look.at > at - LATELY);
          before.current.set(name, [...looks, { at, counters }]);
          const since = (look: { at: number; counters: Counters } | undefined) => (look ? rates(look.counters, counters, at - look.at) : null);
          found.set(name, {
            size: files.reduce((sum, f) => sum + f.size, 0),
            cached: files.reduce((sum, f) => sum + f.cached, 0),
            rates: since(looks[looks.length - 1]),
            lately: since(looks[0]),
          });
        } catch {
          // The page says by itself when nobody answers.
        }
        if (over) return;
      }
      if (!document.hidden) set(found);
      timer = window.setTimeout(look, EVERY);
    };
    void look();
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, [names]);
  return folded;
}
