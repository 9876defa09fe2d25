// How the pool is best divided: the last GiB saves every disk the same time.
import { useState } from "preact/hooks";
import { post, type Advice as One, type AdviceReport } from "../api";
import { bytes, micros, percent } from "../format";
import { useLive } from "../live";
import { Act, Card, Notice, sentence, Shown } from "../parts/ui";
import { Table, type Column } from "../parts/table";
import { useOperator } from "../state";

const known = (a: One) => a.curve.length > 0;

const COLUMNS: Column<One>[] = [
  { name: "Disk", by: (a) => a.name, show: (a) => <a href={`#/disks/${encodeURIComponent(a.name)}`}>{a.name}</a> },
  { name: "Now", number: true, by: (a) => a.present.bytes, show: (a) => bytes(a.present.bytes) },
  { name: "Hits now", number: true, by: (a) => (known(a) ? a.present.hit_ratio : null), show: (a) => (known(a) ? percent(a.present.hit_ratio) : "–") },
  { name: "Share", number: true, by: (a) => (known(a) ? a.share.bytes : null), show: (a) => (known(a) ? bytes(a.share.bytes) : "–") },
  { name: "Hits then", number: true, by: (a) => (known(a) ? a.share.hit_ratio : null), show: (a) => (known(a) ? percent(a.share.hit_ratio) : "–") },
  { name: "Read now", number: true, wide: true, by: (a) => (known(a) ? a.present.latency_us : null), show: (a) => (known(a) ? micros(a.present.latency_us) : "–") },
  { name: "Read then", number: true, wide: true, by: (a) => (known(a) ? a.share.latency_us : null), show: (a) => (known(a) ? micros(a.share.latency_us) : "–") },
  { name: "Working set", number: true, wide: true, by: (a) => a.working_set, show: (a) => bytes(a.working_set) },
  { name: "Why not", wide: true, by: (a) => a.reason ?? "", show: (a) => sentence(a.reason ?? "") },
];

export function Advice() {
  const live = useLive<AdviceReport>("/v1/advice", 15000);
  const operator = useOperator();
  const [applied, setApplied] = useState<AdviceReport | null>(null);
  return (
    <>
      <h1>Advice</h1>
      <p>
        How the flash is best divided: one GiB more would save every disk the same time. Applied, three quarters of each
        share are kept for its disk until the daemon stops.
      </p>
      <Shown live={live} empty={(r) => r.disks.length === 0 && <p>There are no disks yet.</p>}>
        {(report) => (
          <Card
            title="Shares"
            aside={
              operator && (
                <Act
                  disabled={!report.disks.some(known)}
                  act={async () => setApplied(await post<AdviceReport>("/v1/advice/apply"))}
                  done={live.again}
                >
                  Apply
                </Act>
              )
            }
          >
            <p class="dim">
              {bytes(report.capacity)} to divide; from {bytes(report.left_over)} of it nobody would gain.
            </p>
            <Table caption="Shares of the flash" columns={COLUMNS} rows={report.disks} id={(a) => a.name} search={(a) => a.name} />
          </Card>
        )}
      </Shown>
      {applied && (
        <Notice kind="good">
          {(applied.applied ?? []).length === 0
            ? "There was nothing to apply."
            : `Kept: ${(applied.applied ?? []).map((a) => `${a.name} ${bytes(a.kept)}`).join(", ")}.`}
        </Notice>
      )}
    </>
  );
}
