// The miss-ratio curve, upside down as everywhere in Hearth: hit ratio over flash. A handle on it can be dragged, or
// moved with the keys of a slider, and says what a size would do.
import { useState } from "preact/hooks";
import type { Advice } from "../api";
import { bytes, micros, percent } from "../format";

const WIDTH = 640;
const HEIGHT = 260;
const LEFT = 48;
const BOTTOM = 28;
const TOP = 12;
const RIGHT = 14;

/** Hit ratio at a size, between the points of a curve. */
export function at(curve: Advice["curve"], size: number): number {
  let before = curve[0];
  if (!before || size <= before.bytes) return before && before.bytes > 0 ? (before.hit_ratio * size) / before.bytes : (before?.hit_ratio ?? 0);
  for (const point of curve) {
    if (point.bytes >= size) {
      const share = (size - before.bytes) / Math.max(1, point.bytes - before.bytes);
      return before.hit_ratio + share * (point.hit_ratio - before.hit_ratio);
    }
    before = point;
  }
  return before.hit_ratio;
}

export function Curve({ advice }: { advice: Advice }) {
  const { curve } = advice;
  const most = Math.max(1, curve[curve.length - 1]?.bytes ?? 1, advice.present.bytes, advice.advised.bytes, advice.share.bytes);
  const [size, setSize] = useState<number | null>(null);
  const chosen = Math.min(most, size ?? advice.advised.bytes);
  const x = (n: number) => LEFT + (n / most) * (WIDTH - LEFT - RIGHT);
  const y = (ratio: number) => TOP + (1 - ratio) * (HEIGHT - TOP - BOTTOM);
  const hits = at(curve, chosen);
  const latency = hits * advice.hit_us + (1 - hits) * advice.miss_us;
  const line = [`M${x(0)},${y(at(curve, 0))}`, ...curve.map((p) => `L${x(p.bytes)},${y(p.hit_ratio)}`)].join(" ");
  const marks = [
    { name: "now", of: advice.present },
    { name: "advised", of: advice.advised },
    ...(advice.knee ? [{ name: "bend", of: advice.knee }] : []),
  ];
  const drag = (e: PointerEvent) => {
    if (e.buttons === 0 && e.type !== "pointerdown") return;
    const box = (e.currentTarget as SVGElement).getBoundingClientRect();
    const px = ((e.clientX - box.left) / box.width) * WIDTH;
    setSize(Math.max(0, Math.min(most, ((px - LEFT) / (WIDTH - LEFT - RIGHT)) * most)));
  };
  return (
    <div class="curve">
      <svg
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        aria-hidden="true"
        onPointerDown={(e) => {
          (e.currentTarget as SVGElement).setPointerCapture(e.pointerId);
          drag(e);
        }}
        onPointerMove={drag}
      >
        {[0, 0.25, 0.5, 0.75, 1].map((ratio) => (
          <g key={ratio}>
            <line class="grid" x1={LEFT} x2={WIDTH - RIGHT} y1={y(ratio)} y2={y(ratio)} />
            <text class="axis" x={LEFT - 6} y={y(ratio) + 4} text-anchor="end">
              {percent(ratio)}
            </text>
          </g>
        ))}
        {[0, 0.25, 0.5, 0.75, 1].map((share) => (
          <text key={share} class="axis" x={x(share * most)} y={HEIGHT - 8} text-anchor={share === 0 ? "start" : share === 1 ? "end" : "middle"}>
            {bytes(share * most)}
          </text>
        ))}
        <path class="hits" d={line} />
        {marks.map(({ name, of }, i) => (
          <g key={name} class={`mark ${name}`}>
            <line x1={x(of.bytes)} x2={x(of.bytes)} y1={TOP} y2={HEIGHT - BOTTOM} />
            <text x={x(of.bytes) + (of.bytes > most / 2 ? -5 : 5)} y={TOP + 12 + i * 14} text-anchor={of.bytes > most / 2 ? "end" : "start"}>
              {name}
            </text>
          </g>
        ))}
        <line class="handle" x1={x(chosen)} x2={x(chosen)} y1={TOP} y2={HEIGHT - BOTTOM} />
        <circle class="handle" cx={x(chosen)} cy={y(hits)} r={8} />
      </svg>
      <label class="slider">
        Flash for this disk
        <input
          type="range"
          min={0}
          max={most}
          step={Math.max(1, Math.round(most / 200))}
          value={chosen}
          aria-valuetext={`${bytes(chosen)}: ${percent(hits)} hits, ${micros(latency)} a read`}
          onInput={(e) => setSize(Number(e.currentTarget.value))}
        />
      </label>
      <p role="status" data-test="expected">
        With <strong>{bytes(chosen)}</strong>: <strong>{percent(hits)}</strong> of the blocks read come from flash, a read
        takes <strong>{micros(latency)}</strong> in the mean{advice.latency_guessed ? " (latencies are guessed so far)" : ""}. Now:{" "}
        {bytes(advice.present.bytes)}, {percent(advice.present.hit_ratio)}.
      </p>
    </div>
  );
}
