import type { Stats } from "../api";
import { bytes, digits, micros, percent, seconds } from "../format";
import { reasons, type Reason } from "../health";
import { useLive, type Live } from "../live";
import { mood, type Condition, type Report } from "../monitor";
import { Over } from "../parts/over";
import { Bar, Card, sentence, Shown, Tile, Tiles } from "../parts/ui";
import { useDisks, useWorld } from "../state";

export function Overview() {
  const { stats, pool, samples } = useWorld();
  const judged = useLive<Report>("/v1/health", 5000);
  const disks = useDisks(judged.failure !== null);
  const known = judged.data && judged.failure === null ? judged.data : null;
  const wrong = known ? listed(known) : reasons(pool.data, disks.data, stats.data);
  return (
    <>
      <h1>Overview</h1>
      <Shown live={stats}>
        {(data) => (
          <>
            <Health wrong={wrong} judged={judged} />
            <Verdict stats={data} />
            <Over samples={samples} />
            <Flash stats={data} />
          </>
        )}
      </Shown>
    </>
  );
}

/** What the second service judged, the worst first. A drive that reports nothing, such as a virtual one, is on the page of devices. */
function listed(report: Report): Reason[] {
  const order: Condition[] = ["failed", "degraded", "rebuilding", "unknown"];
  const all = report.items.flatMap((item) =>
    (item.reasons ?? [])
      .filter((r) => r.condition !== "healthy" && !(item.kind === "device" && r.condition === "unknown"))
      .map((r) => ({
        rank: order.indexOf(r.condition),
        severity: r.condition === "failed" ? ("bad" as const) : r.condition === "unknown" ? ("info" as const) : ("warn" as const),
        what: r.what,
        of: item.kind === "disk" ? undefined : item.name,
        remedy: r.remedy ?? "",
        disk: item.kind === "disk" ? item.name : undefined,
      })),
  );
  return all.sort((a, b) => a.rank - b.rank);
}

function Health({ wrong, judged }: { wrong: Reason[]; judged: Live<Report> }) {
  const { data, failure } = judged;
  const found: Condition = wrong.length === 0 ? "healthy" : wrong.some((r) => r.severity === "bad") ? "failed" : "degraded";
  const condition = failure === null && data !== null ? data.condition : found;
  // What is wrong is said at once; that nothing is, only when all have been asked.
  const asking = data === null && failure === null && wrong.length === 0;
  return (
    <Card title="Health" aside={!asking && <span class={`state ${mood(condition)}`}>{condition}</span>}>
      {asking && (
        <p class="loading" role="status">
          Loading…
        </p>
      )}
      {failure !== null && failure.trouble !== "gone" && (
        <p class="dim">
          Drives, arrays and file systems are not judged: {failure.message}. This is what the daemon tells.
        </p>
      )}
      {condition === "healthy" && !asking && <p>Nothing is wrong.</p>}
      {wrong.length > 0 && (
        <ul class="reasons">
          {wrong.map((r, i) => (
            <li key={i} class={r.severity}>
              {r.disk && <a href={`#/disks/${encodeURIComponent(r.disk)}`}>{r.disk}</a>} {r.of && <code>{r.of}</code>}{" "}
              <strong>{sentence(r.what)}</strong>{" "}
              {sentence(r.remedy)}
            </li>
          ))}
        </ul>
      )}
    </Card>
  );
}

/** Is it helping? One sentence with its figure, of the longest window in which something was read. */
function Verdict({ stats }: { stats: Stats }) {
  const span = ["1h", "5min", "1d", "total"]
    .map((name) => stats.pool.disks.find((s) => s.span === name))
    .find((s) => s?.ratios.speedup != null);
  if (!span) {
    return (
      <Card title="Is it helping?">
        <p>Nothing was read or written yet, so there is nothing to compare.</p>
      </Card>
    );
  }
  const times = span.ratios.speedup!;
  const over = span.span === "total" ? "since the daemon started" : `over the last ${seconds(span.seconds)}`;
  return (
    <Card title="Is it helping?">
      <p class="verdict">
        {times >= 1.05 ? (
          <>
            Without the cache the machines' disks would have been <strong>{digits(times)} times slower</strong> {over}.
          </>
        ) : times > 0.95 ? (
          <>The cache made hardly a difference {over}.</>
        ) : (
          <>
            The machines' disks were <strong>{digits(1 / times)} times slower with the cache</strong> {over}.
          </>
        )}
      </p>
      <Tiles>
        <Tile label="Read hits" value={percent(span.ratios.read_hit_ratio)} more={`${percent(span.ratios.read_hit_ratio_bytes)} of the bytes`} />
        <Tile label="Mean read" value={micros(span.ratios.read_mean_us)} more={`${micros(span.ratios.uncached_read_us)} without the cache`} />
        <Tile label="Mean write" value={micros(span.ratios.write_mean_us)} more={`${micros(span.ratios.uncached_write_us)} without the cache`} />
      </Tiles>
    </Card>
  );
}

function Flash({ stats }: { stats: Stats }) {
  const { pool } = stats;
  const day = pool.spans.find((s) => s.span === "1d");
  return (
    <Card title="Flash">
      <Bar label="Used" value={pool.cached} of={pool.capacity} text={`${bytes(pool.cached)} of ${bytes(pool.capacity)}`} />
      <Bar label="Dirty" value={pool.dirty} of={pool.capacity} text={bytes(pool.dirty)} />
      {pool.endurance_used > 0 && (
        <Bar label="Endurance budget" value={pool.endurance_used} of={1} text={percent(pool.endurance_used)} />
      )}
      <Tiles>
        <Tile
          label="Written today"
          value={bytes(day?.counters.flash_write_bytes ?? 0)}
          more={day ? `in ${seconds(day.seconds)}` : undefined}
        />
        <Tile label="Write amplification" value={day?.write_amplification == null ? "–" : digits(day.write_amplification)} more="bytes written for each byte cached" />
        <Tile label="RAM" value={bytes(pool.ram)} more="for the index, the policy and the stage" />
      </Tiles>
    </Card>
  );
}
