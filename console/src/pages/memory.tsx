// The host's memory: how short it is, what the controller does about it and to whom, and the swap on flash. It is
// shown and not changed here: what is set belongs to the host.
import type { Schemas } from "../api";
import { bytes, byteRate, clock, percent, seconds } from "../format";
import { useLive } from "../live";
import { Table, type Column } from "../parts/table";
import { Bar, Card, Copy, Notice, sentence, Shown, Tile, Tiles } from "../parts/ui";

/** A guest, as the controller sees it. */
interface Guest {
  name: string;
  assigned: number;
  resident: number;
  active: number;
  balloon: number | null;
  minimum: number;
  swapped: number;
  compressed: number | null;
  stalled_ms: number | null;
}

interface Step {
  at: number;
  why: string;
  error: string | null;
}

interface Memory {
  controller: "running" | "silent" | "off";
  at: number;
  level?: "high" | "clear" | "soft" | "hard" | "low";
  helpless?: string | null;
  /** What is not possible with which guest. */
  gaps?: string[];
  seen: {
    total: number;
    available: number;
    swap_total: number;
    swap_free: number;
    swap_in: number;
    pressure: { some: number; full: number } | null;
    zswap: { on: boolean; compressor: string; pool_percent: number; pool: number | null; stored: number | null } | null;
    guests: Guest[];
    notes: string[];
  };
  steps: Step[];
}

type Swap = Schemas["SwapInfo"];

const LEVELS = { high: "good", clear: "good", soft: "warn", hard: "bad", low: "bad" } as const;

const some = (n: number | null | undefined) => (n == null ? "–" : bytes(n));

const GUESTS: Column<Guest>[] = [
  { name: "Guest", by: (g) => g.name, show: (g) => g.name },
  { name: "Assigned", number: true, by: (g) => g.assigned, show: (g) => bytes(g.assigned) },
  { name: "Resident", number: true, by: (g) => g.resident, show: (g) => bytes(g.resident) },
  { name: "Active", number: true, wide: true, by: (g) => g.active, show: (g) => bytes(g.active) },
  { name: "Has", number: true, wide: true, by: (g) => g.balloon, show: (g) => some(g.balloon) },
  { name: "Minimum", number: true, wide: true, by: (g) => g.minimum, show: (g) => bytes(g.minimum) },
  { name: "Swapped", number: true, by: (g) => g.swapped, show: (g) => bytes(g.swapped) },
  { name: "Compressed", number: true, wide: true, by: (g) => g.compressed, show: (g) => some(g.compressed) },
  {
    name: "Stalled",
    number: true,
    wide: true,
    by: (g) => g.stalled_ms,
    show: (g) => (g.stalled_ms == null ? "–" : seconds(g.stalled_ms / 1000)),
  },
];

export function Memory() {
  const memory = useLive<Memory>("/v1/memory", 2000);
  const swap = useLive<Swap>("/v1/swap", 4000);
  return (
    <>
      <h1>Memory</h1>
      <Shown live={memory}>
        {(told) => (
          <>
            <Host told={told} />
            {told.controller === "running" && <Guests told={told} />}
            {told.controller === "running" && <Steps steps={told.steps} />}
          </>
        )}
      </Shown>
      <Card title="Swap on flash">
        <Shown
          live={swap}
          empty={(s) =>
            s.areas.length === 0 && (
              <>
                <p>There is none. On the host, this makes some, and the kernel swaps to it at the flash's own speed:</p>
                <p>
                  <code>hearth swap on --size 8G</code> <Copy text="hearth swap on --size 8G" />
                </p>
              </>
            )
          }
        >
          {(s) => <Areas swap={s} />}
        </Shown>
      </Card>
    </>
  );
}

function Host({ told }: { told: Memory }) {
  const { seen } = told;
  const { pressure, zswap } = seen;
  return (
    <Card
      title="This host"
      aside={told.level && <span class={`state ${LEVELS[told.level]}`}>{told.level}</span>}
    >
      {told.controller === "off" && (
        <Notice kind="info">
          <strong>No memory controller runs.</strong> For hosts on which more machines run than fit into memory:{" "}
          <code>systemctl enable --now hearth-memory</code>; <code>hearth memory plan</code> says before what it could do.
        </Notice>
      )}
      {told.controller === "silent" && (
        <Notice kind="bad">
          <strong>The memory controller says nothing any more</strong> and may have left things changed. Look at its log;{" "}
          <code>hearth memory undo</code> sets them back.
        </Notice>
      )}
      {told.helpless && (
        <Notice kind="bad">
          <strong>Nothing helps any more.</strong> {sentence(told.helpless)}
        </Notice>
      )}
      <Bar
        label="Memory in use"
        value={seen.total - seen.available}
        of={seen.total}
        text={`${bytes(seen.total - seen.available)} of ${bytes(seen.total)}`}
      />
      {seen.swap_total > 0 && (
        <Bar
          label="Swap in use"
          value={seen.swap_total - seen.swap_free}
          of={seen.swap_total}
          text={`${bytes(seen.swap_total - seen.swap_free)} of ${bytes(seen.swap_total)}`}
        />
      )}
      <Tiles>
        <Tile label="Available" value={bytes(seen.available)} more="without anything being swapped out" />
        <Tile
          label="Waiting for memory"
          value={pressure ? percent(pressure.some / 100) : "–"}
          more={pressure ? `of the time something, ${percent(pressure.full / 100)} everything` : "this kernel does not tell"}
        />
        <Tile
          label="Compression"
          value={zswap ? (zswap.on ? "on" : "off") : "–"}
          more={
            zswap
              ? zswap.stored != null && zswap.pool != null && zswap.on
                ? `${bytes(zswap.stored)} in ${bytes(zswap.pool)}, ${zswap.compressor}`
                : zswap.on
                  ? zswap.compressor
                  : undefined
              : "not in this kernel"
          }
        />
        {told.controller === "running" && <Tile label="Read back from swap" value={byteRate(seen.swap_in)} />}
      </Tiles>
    </Card>
  );
}

function Guests({ told }: { told: Memory }) {
  const { guests, notes } = told.seen;
  return (
    <Card title="Guests">
      {guests.length === 0 ? (
        <p>The controller knows of no guest.</p>
      ) : (
        <Table caption="Guests" columns={GUESTS} rows={guests} id={(g) => g.name} search={(g) => g.name} />
      )}
      {[...(told.gaps ?? []), ...notes].map((note) => (
        <p class="dim" key={note}>
          {sentence(note)}
        </p>
      ))}
    </Card>
  );
}

function Steps({ steps }: { steps: Step[] }) {
  return (
    <Card title="What the controller did">
      {steps.length === 0 ? (
        <p>Nothing: memory was not short.</p>
      ) : (
        <ol class="events" aria-label="Steps, the newest first">
          {[...steps].reverse().map((step, i) => (
            <li key={`${step.at} ${i}`}>
              <time dateTime={new Date(step.at).toISOString()}>{clock(step.at)}</time>
              <span class={`state ${step.error ? "bad" : "info"}`}>{step.error ? "failed" : "done"}</span>
              <span>
                {sentence(step.why)} {step.error && sentence(step.error)}
              </span>
            </li>
          ))}
        </ol>
      )}
    </Card>
  );
}

function Areas({ swap }: { swap: Swap }) {
  return (
    <>
      {swap.areas.map((area) => (
        <div key={area.path}>
          <p>
            <span class={`state ${area.on ? "good" : "warn"}`}>{area.on ? "on" : "off"}</span> <code>{area.path}</code>, priority{" "}
            {area.priority}
            {!area.on && (
              <>
                {" "}
                – the kernel does not swap to it; <code>hearth swap resume</code> takes it up again
              </>
            )}
          </p>
          <Bar label="Swapped out" value={area.used} of={area.size} text={`${bytes(area.used)} of ${bytes(area.size)}`} />
        </div>
      ))}
      {swap.settings.length > 0 && (
        <>
          <h3>Set for it on this host</h3>
          <ul>
            {swap.settings.map((set) => (
              <li key={set.path}>
                <code>{set.path}</code> is {set.now} and was {set.before}: {set.why}
              </li>
            ))}
          </ul>
        </>
      )}
      <p class="dim">Hearth is not in the way of a page: stopping the daemon changes nothing for what is swapped out.</p>
    </>
  );
}
