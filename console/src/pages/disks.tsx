import { useMemo } from "preact/hooks";
import type { Datastore, Stats } from "../api";
import { useFolded } from "../folded";
import { bytes, byteRate, count, micros, percent, rate } from "../format";
import { useLive } from "../live";
import { Table, type Column } from "../parts/table";
import { Shown, State } from "../parts/ui";
import { now, useEach, type Rates } from "../samples";
import { useDisks, useOperator, useWorld } from "../state";
import { storePage, StoreState } from "./datastores";

interface Row {
  name: string;
  link: string;
  state: string;
  size: number | null;
  mode: string;
  cached: number | null;
  /** Null where nobody knows. */
  dirty: number | null;
  clients: number | null;
  /** What a search looks at besides. */
  origin: string;
  /** Of a datastore, how many files are folded into this row. */
  files?: number;
  rates: Rates | null;
  hits: number | null;
  latency: number | null;
  store?: Datastore;
}

export const diskPage = (name: string) => `#/disks/${encodeURIComponent(name)}`;

const maybe = (n: number | null) => (n === null ? "–" : bytes(n));

const COLUMNS: Column<Row>[] = [
  {
    name: "Name",
    by: (r) => r.name,
    show: (r) => (
      <>
        <a href={r.link}>{r.name}</a>
        {r.files !== undefined && (
          <small>
            {" "}
            {count(r.files)} {r.files === 1 ? "file" : "files"} of a datastore
          </small>
        )}
      </>
    ),
  },
  { name: "State", by: (r) => r.state, show: (r) => (r.store ? <StoreState store={r.store} /> : <State state={r.state} />) },
  { name: "Size", number: true, wide: true, by: (r) => r.size, show: (r) => maybe(r.size) },
  { name: "Mode", wide: true, by: (r) => r.mode, show: (r) => r.mode },
  { name: "Reads", number: true, by: (r) => r.rates?.reads ?? null, show: (r) => (r.rates ? rate(r.rates.reads) : "–") },
  { name: "Writes", number: true, by: (r) => r.rates?.writes ?? null, show: (r) => (r.rates ? rate(r.rates.writes) : "–") },
  {
    name: "Throughput",
    number: true,
    wide: true,
    by: (r) => (r.rates ? r.rates.readBytes + r.rates.writeBytes : null),
    show: (r) => (r.rates ? byteRate(r.rates.readBytes + r.rates.writeBytes) : "–"),
  },
  { name: "Hits (5 min)", number: true, by: (r) => r.hits, show: (r) => percent(r.hits) },
  { name: "Read (5 min)", number: true, wide: true, by: (r) => r.latency, show: (r) => micros(r.latency) },
  { name: "Cached", number: true, wide: true, by: (r) => r.cached, show: (r) => maybe(r.cached) },
  { name: "Dirty", number: true, by: (r) => r.dirty, show: (r) => (r.dirty === null ? "unknown" : bytes(r.dirty)) },
  { name: "Clients", number: true, wide: true, by: (r) => r.clients, show: (r) => r.clients ?? "–" },
];

const search = (r: Row) => `${r.name} ${r.origin} ${r.state} ${r.mode}`;
const id = (r: Row) => r.link;

export function Disks() {
  const { stores } = useWorld();
  const disks = useDisks();
  const stats = useLive<Stats>("/v1/stats", 2000);
  const samples = useEach(stats.data);
  const operator = useOperator();
  const folded = useFolded(stores.data);
  const rows = useMemo(() => {
    const spans = new Map(stats.data?.disks.map((d) => [d.name, d.spans.find((s) => s.span === "5min")]));
    const all: Row[] = (disks.data ?? []).map((disk) => ({
      name: disk.name,
      link: diskPage(disk.name),
      state: disk.state,
      size: disk.size,
      mode: disk.home === "scratch" ? "scratch" : disk.mode,
      cached: disk.cached,
      dirty: disk.dirty_unknown ? null : disk.dirty,
      clients: disk.connections,
      origin: disk.origin,
      rates: now(samples, (s) => s.disks.get(disk.name)),
      hits: spans.get(disk.name)?.ratios.read_hit_ratio ?? null,
      latency: spans.get(disk.name)?.ratios.read_mean_us ?? null,
    }));
    for (const store of stores.data ?? []) {
      const of = folded.get(store.name);
      all.push({
        name: store.name,
        link: storePage(store.name),
        state: store.served ? "served" : "not served",
        size: of?.size ?? null,
        mode: "datastore",
        cached: of?.cached ?? null,
        dirty: store.dirty,
        clients: null,
        origin: store.directory,
        files: store.disks,
        rates: of?.rates ?? null,
        hits: of?.lately?.hitRatio ?? null,
        latency: of?.lately?.readUs ?? null,
        store,
      });
    }
    return all;
  }, [disks.data, stores.data, folded, stats.data, samples]);
  return (
    <>
      <header class="page">
        <h1>Disks</h1>
        {operator && (
          <a class="button" href="#/add">
            Add a disk
          </a>
        )}
      </header>
      <Shown
        live={disks}
        empty={(all) =>
          all.length === 0 &&
          (stores.data ?? []).length === 0 && (
            <>
              <p>There are no disks yet.</p>
              <p>
                {operator ? <a href="#/add">Add one</a> : "An operator can add one"}, or type{" "}
                <code>hearth disk add NAME --origin PATH</code> on the host.
              </p>
            </>
          )
        }
      >
        {() => <Table caption="Disks" columns={COLUMNS} rows={rows} id={id} search={search} />}
      </Shown>
    </>
  );
}
