// State that all pages share: the session, and what the daemon reports of the pool, each requested once.
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { Datastore, Disk, Pool, Session, Stats } from "./api";
import { useLive, type Live } from "./live";
import { useOne, type Sample } from "./samples";

export interface World {
  session: Session;
  /** Of the pool and of all disks together, without single disks. */
  stats: Live<Stats>;
  pool: Live<Pool>;
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

/** All disks: hundreds of KiB with hundreds of disks, so only pages that show them ask for them. */
export const useDisks = (wanted = true) => useLive<Disk[]>(wanted ? "/v1/disks" : null, 2000);

export function useTheWorld(session: Session): World {
  const stats = useLive<Stats>("/v1/stats?disks=false", 2000);
  const pool = useLive<Pool>("/v1/pool", 5000);
  const stores = useLive<Datastore[]>("/v1/datastores", 3000);
  const samples = useOne(stats.data?.pool.disks ?? null);
  return { session, stats, pool, stores, samples };
}
