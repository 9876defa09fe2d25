// What the guest does to a disk, as vscsiStats counts it: one of sixteen at a time.
import { useState } from "preact/hooks";
import { diskPath, post, type HistogramReport } from "../api";
import { count, percent } from "../format";
import { useLive } from "../live";
import { Act, Card, Shown } from "../parts/ui";
import { useOperator } from "../state";

export function Histograms({ name }: { name: string }) {
  const live = useLive<HistogramReport>(diskPath(name, "/histogram"), 5000);
  const operator = useOperator();
  const [which, setWhich] = useState(0);
  return (
    <Card
      title="Histograms"
      aside={
        operator && (
          <Act act={() => post(diskPath(name, "/histogram/reset"))} done={live.again}>
            Begin anew
          </Act>
        )
      }
    >
      <Shown live={live} empty={(h) => h.histograms.length === 0 && <p>Nobody has read or written yet.</p>}>
        {(report) => {
          const one = report.histograms[which] ?? report.histograms[0]!;
          const most = Math.max(1, ...one.buckets.map((b) => b.count));
          return (
            <>
              <label>
                Show{" "}
                <select value={which} onChange={(e) => setWhich(Number(e.currentTarget.value))}>
                  {report.histograms.map((h, i) => (
                    <option key={h.title} value={i}>
                      {h.title} ({count(h.count)})
                    </option>
                  ))}
                </select>
              </label>
              <p class="dim">
                {count(one.count)} values, mean {count(one.mean)}, from {count(one.min)} to {count(one.max)}
              </p>
              <table class="histogram">
                <caption class="hidden">{one.title}</caption>
                <thead class="hidden">
                  <tr>
                    <th scope="col">Up to</th>
                    <th scope="col">Share</th>
                    <th scope="col">Number</th>
                  </tr>
                </thead>
                <tbody>
                  {one.buckets.map((b, i) => (
                    <tr key={i}>
                      <th scope="row" class="number">
                        {b.up_to == null ? "more" : `≤ ${count(b.up_to)}`}
                      </th>
                      <td>
                        <span class="fill" style={{ width: `${(b.count / most) * 100}%` }} aria-hidden="true" />
                        <span class="hidden">{percent(one.count > 0 ? b.count / one.count : 0)}</span>
                      </td>
                      <td class="number">{count(b.count)}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </>
          );
        }}
      </Shown>
    </Card>
  );
}
