// Lines over time. They are drawn on a canvas, which nobody can read who does not see it: so the newest values are
// its label, and a table of the newest folds out below.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { useTheme } from "./theme";

export interface Line {
  name: string;
  /** A colour of the style sheet, `--c1` and so on. */
  color: string;
  values: (number | null)[];
}

const HEIGHT = 190;

const DAY = 86400;

/** Times as they are told apart: with seconds over hours, with the day over days. */
function stamp(at: number, long: boolean): string {
  const date = new Date(at * 1000);
  return long
    ? date.toLocaleString("sv", { month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit" })
    : date.toLocaleTimeString("sv");
}

const isLong = (at: number[]) => at.length > 1 && at[at.length - 1]! - at[0]! > DAY;

/** A minute at least, and now if there is nothing yet. */
function span(plot: uPlot, min: number | null, max: number | null): [number, number] {
  // For a single point uPlot proposes a day after it.
  const end = (plot.data[0].length === 1 ? min : max) ?? Date.now() / 1000;
  return [Math.min(min ?? end, end - 60), end];
}

function make(host: HTMLElement, lines: Line[], show: (n: number) => string, top?: number): uPlot {
  const style = getComputedStyle(document.documentElement);
  const color = (name: string) => style.getPropertyValue(name).trim();
  const axis: uPlot.Axis = {
    stroke: color("--dim"),
    grid: { stroke: color("--line"), width: 1 },
    ticks: { show: false },
    font: "12px system-ui, sans-serif",
  };
  return new uPlot(
    {
      width: Math.max(200, host.clientWidth),
      height: HEIGHT,
      title: "",
      cursor: { y: false, drag: { x: false, y: false } },
      legend: { show: true, live: true },
      scales: { x: { range: span }, y: { range: (_, __, max) => [0, top ?? (max > 0 ? max * 1.1 : 1)] } },
      axes: [
        { ...axis, values: (plot, at) => at.map((s) => stamp(s, isLong(plot.data[0] as number[]))), space: 90 },
        { ...axis, values: (_, at) => at.map(show), size: 74 },
      ],
      series: [
        { label: "Time", value: (plot, s) => (s == null ? "–" : stamp(s, isLong(plot.data[0] as number[]))) },
        ...lines.map((line) => ({
          label: line.name,
          stroke: color(line.color),
          width: 2,
          spanGaps: false,
          points: { show: false },
          value: (_: uPlot, n: number | null) => (n == null ? "–" : show(n)),
        })),
      ],
    },
    [[], ...lines.map(() => [])] as uPlot.AlignedData,
    host,
  );
}

export function Chart({
  title,
  at,
  lines,
  show,
  top,
}: {
  title: string;
  /** Seconds since 1970. */
  at: number[];
  lines: Line[];
  show: (n: number) => string;
  /** The upper end of the scale, if it is fixed. */
  top?: number;
}) {
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const theme = useTheme();
  const names = lines.map((l) => l.name).join("\n");
  useEffect(() => {
    const where = host.current;
    if (!where) return;
    const made = make(where, lines, show, top);
    plot.current = made;
    const resize = new ResizeObserver(() => made.setSize({ width: Math.max(200, where.clientWidth), height: HEIGHT }));
    resize.observe(where);
    return () => {
      resize.disconnect();
      made.destroy();
      plot.current = null;
    };
    // The lines' values are put in below.
  }, [theme, names]);
  useEffect(() => {
    plot.current?.setData([at, ...lines.map((l) => l.values)] as uPlot.AlignedData);
  }, [at, lines, theme]);
  const last = (values: (number | null)[]) => {
    const found = values.filter((v) => v !== null);
    return found.length ? show(found[found.length - 1]!) : "nothing yet";
  };
  const label = `${title}: ${lines.map((l) => `${l.name} ${last(l.values)}`).join(", ")}`;
  const rows = at.map((_, i) => i).slice(-10).reverse();
  return (
    <figure class="chart">
      <div ref={host} role="img" aria-label={label} />
      <details>
        <summary>{title} as a table</summary>
        <table>
          <thead>
            <tr>
              <th scope="col">Time</th>
              {lines.map((l) => (
                <th key={l.name} scope="col" class="number">
                  {l.name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map((i) => (
              <tr key={at[i]}>
                <td>{stamp(at[i]!, isLong(at))}</td>
                {lines.map((l) => (
                  <td key={l.name} class="number">
                    {l.values[i] == null ? "–" : show(l.values[i]!)}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </details>
    </figure>
  );
}
