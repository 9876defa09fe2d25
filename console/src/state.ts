// What all pages look at: who we are, and what the daemon says of itself. Asked for once, for whoever shows it.
import { createContext } from "preact";
import { useContext, useEffect, useState } from "preact/hooks";
import type { Datastore, Disk, Pool, Session, Stats } from "./api";
import { useLive, type Live } from "./live";
import { added, sample, type Sample } from "./samples";

export interface World {
  session: Session;
  stats: Live<Stats>;
  pool: Live<Pool>;
  disks: Live<Disk[]>;
  stores: Live<Datastore[]>;
  samples: Sample[];
}

export const Here = createContext<World | null>(null);

export function useWorld(): World {
  const world = useContext(Here);
  if (!world) throw new Error("no world");
  return world;
}

export const useOperator = () => useWorld().session.role === "operator";

export function useTheWorld(session: Session): World {
  const stats = useLive<Stats>("/v1/stats", 2000);
  const pool = useLive<Pool>("/v1/pool", 5000);
  const disks = useLive<Disk[]>("/v1/disks", 2000);
  const stores = useLive<Datastore[]>("/v1/datastores", 3000);
  const [samples, set] = useState<Sample[]>([]);
  useEffect(() => {
    if (stats.data) {
      const newest = sample(stats.data);
      set((all) => added(all, newest));
    }
  }, [stats.data]);
  return { session, stats, pool, disks, stores, samples };
}
