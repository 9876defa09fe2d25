// What was done over time, of one disk or of all: as this page has seen it since it was opened, or as it is kept, for
// ninety days.
import { useMemo, useState } from "preact/hooks";
import { byteRate, micros, percent, rate } from "../format";
import { historyPath, past, RANGES, type History } from "../history";
import { useLive } from "../live";
import { series, type Sample, type Series } from "../samples";
import { Chart } from "./chart";
import { Card, Shown } from "./ui";

const NOW = "now";

/** The range is that of all charts, and stays when another page is opened. */
let chosen: string = RANGES[0].name;

export function Over({ samples, disk }: { samples: Sample[]; disk?: string }) {
  const [range, setRange] = useState(chosen);
  const since = RANGES.find((r) => r.name === range)?.since;
  const kept = useLive<History>(since === undefined ? null : historyPath(since, disk), 10000);
  const live = useMemo(() => series(samples), [samples]);
  const remembered = useMemo(() => (kept.data ? past(kept.data) : null), [kept.data]);
  const choose = (name: string) => {
    chosen = name;
    setRange(name);
  };
  return (
    <section aria-label="Over time">
      <div class="tools">
        <h2>Over time</h2>
        <label>
          Show{" "}
          <select value={range} onChange={(e) => choose(e.currentTarget.value)}>
            <option value={NOW}>since this page was opened</option>
            {RANGES.map((r) => (
              <option key={r.name} value={r.name}>
                the last {r.name}
              </option>
            ))}
          </select>
        </label>
      </div>
      {since === undefined ? (
        <Charts all={live} without="Reads without the cache (5 min)" />
      ) : (
        <Shown
          live={kept}
          empty={(h) => h.at.length === 0 && <p>Nothing is recorded of that time. The service hearth-monitor records every 10 seconds while it runs.</p>}
        >
          {() => remembered && <Charts all={remembered} without="Reads without the cache" />}
        </Shown>
      )}
    </section>
  );
}

function Charts({ all, without }: { all: Series; without: string }) {
  const lines = useMemo(() => {
    const values = <K extends "hitRatio" | "readUs" | "writeUs" | "readBytes" | "writeBytes" | "reads" | "writes">(name: K) =>
      all.of.map((r) => r?.[name] ?? null);
    return {
      hits: [{ name: "Read hits", color: "--c1", values: values("hitRatio") }],
      latency: [
        { name: "Reads", color: "--c1", values: values("readUs") },
        { name: without, color: "--c3", values: all.without },
        { name: "Writes", color: "--c2", values: values("writeUs") },
      ],
      bytes: [
        { name: "Read", color: "--c1", values: values("readBytes") },
        { name: "Written", color: "--c2", values: values("writeBytes") },
      ],
      requests: [
        { name: "Reads", color: "--c1", values: values("reads") },
        { name: "Writes", color: "--c2", values: values("writes") },
      ],
    };
  }, [all, without]);
  return (
    <div class="columns">
      <Card title="Hit ratio">
        <Chart title="Hit ratio" at={all.at} lines={lines.hits} show={percent} top={1} />
      </Card>
      <Card title="Mean latency">
        <Chart title="Latency" at={all.at} lines={lines.latency} show={micros} />
      </Card>
      <Card title="Throughput">
        <Chart title="Throughput" at={all.at} lines={lines.bytes} show={byteRate} />
      </Card>
      <Card title="Requests">
        <Chart title="Requests" at={all.at} lines={lines.requests} show={rate} />
      </Card>
    </div>
  );
}
