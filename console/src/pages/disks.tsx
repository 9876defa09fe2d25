import { useMemo } from "preact/hooks";
import type { Disk } from "../api";
import { bytes, byteRate, micros, percent, rate } from "../format";
import { Table, type Column } from "../parts/table";
import { Shown, State } from "../parts/ui";
import { now, type Rates } from "../samples";
import { useOperator, useWorld } from "../state";

interface Row {
  disk: Disk;
  rates: Rates | null;
  hits: number | null;
  latency: number | null;
}

export const diskPage = (name: string) => `#/disks/${encodeURIComponent(name)}`;

const COLUMNS: Column<Row>[] = [
  { name: "Name", by: (r) => r.disk.name, show: (r) => <a href={diskPage(r.disk.name)}>{r.disk.name}</a> },
  { name: "State", by: (r) => r.disk.state, show: (r) => <State state={r.disk.state} /> },
  { name: "Size", number: true, wide: true, by: (r) => r.disk.size, show: (r) => bytes(r.disk.size) },
  { name: "Mode", wide: true, by: (r) => r.disk.mode, show: (r) => r.disk.mode },
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
  { name: "Cached", number: true, wide: true, by: (r) => r.disk.cached, show: (r) => bytes(r.disk.cached) },
  { name: "Dirty", number: true, by: (r) => r.disk.dirty, show: (r) => bytes(r.disk.dirty) },
  { name: "Clients", number: true, wide: true, by: (r) => r.disk.connections, show: (r) => r.disk.connections },
];

const search = (r: Row) => `${r.disk.name} ${r.disk.origin} ${r.disk.state} ${r.disk.mode}`;
const id = (r: Row) => r.disk.name;

export function Disks() {
  const { disks, stats, samples } = useWorld();
  const operator = useOperator();
  const rows = useMemo(() => {
    const spans = new Map(stats.data?.disks.map((d) => [d.name, d.spans.find((s) => s.span === "5min")]));
    return (disks.data ?? []).map((disk) => ({
      disk,
      rates: now(samples, disk.name),
      hits: spans.get(disk.name)?.ratios.read_hit_ratio ?? null,
      latency: spans.get(disk.name)?.ratios.read_mean_us ?? null,
    }));
  }, [disks.data, stats.data, samples]);
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
          all.length === 0 && (
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
