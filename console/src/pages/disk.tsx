// One disk: what it does, what it could do, and what can be done with it.
import { useState } from "preact/hooks";
import { diskPath, patch, post, type AdviceReport, type Disk as Info, type DiskStats, type Schemas } from "../api";
import { bytes, byteRate, clock, digits, micros, percent, rate, seconds } from "../format";
import { useLive } from "../live";
import { Curve } from "../parts/curve";
import { Over } from "../parts/over";
import { Typed, type Way } from "../parts/typed";
import { Act, Ask, Card, drawn, Field, Notice, sentence, Shown, State, Tile, Tiles } from "../parts/ui";
import { now, useOne } from "../samples";
import { useOperator } from "../state";
import { Histograms } from "./histograms";
import { Legs, Second } from "./legs";
import { Recordings } from "./recordings";
import { Settings } from "./settings";

export function Disk({ name }: { name: string }) {
  const disk = useLive<Info>(diskPath(name), 1500);
  const stats = useLive<DiskStats>(diskPath(name, "/stats"), 2000);
  return (
    <>
      <p class="path">
        <a href="#/disks">Disks</a> / {name}
      </p>
      {!drawn(disk) && <h1>{name}</h1>}
      <Shown live={disk}>
        {(info) => (
          <>
            <Head disk={info} again={disk.again} />
            <Trouble disk={info} again={disk.again} />
            <Legs disk={info} again={disk.again} />
            <Shown live={stats}>{(data) => <Rates name={name} stats={data} disk={info} />}</Shown>
            <WhatIf name={name} />
            <Histograms name={name} />
            <div class="columns">
              <Settings disk={info} again={disk.again} />
              <div>
                <Recordings disk={info} again={disk.again} />
                <Second disk={info} again={disk.again} />
              </div>
            </div>
            <Move disk={info} again={disk.again} />
            <Attach name={name} />
            <Who disk={info} />
          </>
        )}
      </Shown>
    </>
  );
}

function Head({ disk, again }: { disk: Info; again: () => void }) {
  const operator = useOperator();
  const [removing, setRemoving] = useState(false);
  const under = disk.state === "flushing" || disk.state === "removing";
  const onFlash = disk.home === "flash" || disk.home === "scratch";
  const isUsed = disk.connections > 0 || (disk.clients ?? []).length > 0;
  return (
    <>
      <header class="page">
        <h1>
          {disk.name} <State state={disk.state} />
        </h1>
        {operator && (
          <div class="acts">
            {under ? (
              <Act act={() => post(diskPath(disk.name, "/cancel"))} done={again}>
                Call it off
              </Act>
            ) : (
              <>
                {!onFlash && (
                  <Act act={() => post(diskPath(disk.name, "/flush"))} done={again}>
                    Flush
                  </Act>
                )}
                <button type="button" class="danger" onClick={() => setRemoving(true)}>
                  Remove…
                </button>
              </>
            )}
          </div>
        )}
      </header>
      <p class="dim">
        {bytes(disk.size)}, {disk.mode}
        {disk.read_only ? ", read-only" : ""},{" "}
        {(disk.legs ?? []).length > 0 ? (
          `a mirror of ${disk.legs!.length} ${disk.legs!.length === 1 ? "leg" : "legs"}`
        ) : onFlash ? (
          disk.home === "flash" ? "lives on flash" : "a scratch disk on flash: empty after a crash"
        ) : (
          <>
            on <code>{disk.origin}</code>
          </>
        )}
      </p>
      {disk.order && (
        <p>
          {disk.order.in_order
            ? `With all flash lost, its origin would be the disk as after a power cut${disk.order.upto == null ? "" : ` at ${clock(disk.order.upto)}`}.`
            : disk.order.begins
              ? "Its origin has everything; its order begins when flash has noted that, within seconds."
              : "Its origin is not in order yet: what was dirty when the disk became ordered has to be written back first."}{" "}
          {disk.order.behind > 0 && `It is ${seconds(disk.order.behind)} behind.`} {disk.order.late && "Writes wait for it."}
        </p>
      )}
      <Progress disk={disk} />
      <Ask open={removing} title={`Remove ${disk.name}?`} close={() => setRemoving(false)}>
        <p>
          {onFlash ? (
            <strong>It lives on flash, and is gone then with everything on it.</strong>
          ) : (
            `Everything dirty (${bytes(disk.dirty)}) is written to the origin first; then Hearth forgets the disk. The origin
          stays, and is the disk.`
          )}
        </p>
        {isUsed && (
          <Notice kind="warn">
            {(disk.clients ?? []).map(clientName).join(", ") || `${disk.connections} connections`}{" "}
            {(disk.clients ?? []).length === 1 ? "uses" : "use"} it now. A virtual machine that uses the disk loses it.
          </Notice>
        )}
        <Act
          class="danger"
          act={() => post(diskPath(disk.name, "/remove"), { yes: isUsed, discard_dirty: onFlash })}
          done={() => {
            setRemoving(false);
            again();
          }}
        >
          {isUsed ? "Cut them off and remove" : onFlash ? "Throw it away" : "Remove"}
        </Act>{" "}
        <button type="button" onClick={() => setRemoving(false)}>
          Keep it
        </button>
      </Ask>
    </>
  );
}

/** From flash to an origin: only a disk that lives there has none. */
function Move({ disk, again }: { disk: Info; again: () => void }) {
  const operator = useOperator();
  const [origin, setOrigin] = useState("");
  if (!operator || disk.home !== "flash") return null;
  return (
    <Card title="Give it an origin">
      <details>
        <summary>Move it to a file</summary>
        <p>All that it has is written there, while it is used; then it is a disk like any other, and the file is the disk once it is flushed.</p>
        <Field label="File" hint="One that does not exist, which is made, or an empty one of the disk's size">
          <input value={origin} onInput={(e) => setOrigin(e.currentTarget.value)} />
        </Field>
        <Act disabled={!origin.trim()} act={() => post(diskPath(disk.name, "/move"), { origin: origin.trim() })} done={again}>
          Move
        </Act>
      </details>
    </Card>
  );
}

function Progress({ disk }: { disk: Info }) {
  const { progress } = disk;
  const [whole, setWhole] = useState(0);
  if (!progress || progress.done) return null;
  if (progress.bytes_left > whole) setWhole(progress.bytes_left);
  const most = Math.max(whole, progress.bytes_left, 1);
  const text = `${bytes(progress.bytes_left)} left at ${byteRate(progress.bytes_per_second)}${progress.eta_seconds == null ? "" : `, ${seconds(progress.eta_seconds)}`}`;
  return (
    <p class="progress" role="status">
      <progress max={most} value={most - progress.bytes_left} aria-label={`${disk.state}: ${text}`} /> {text}
    </p>
  );
}

function Trouble({ disk, again }: { disk: Info; again: () => void }) {
  const operator = useOperator();
  const lost = (disk.lost ?? []).reduce((sum, r) => sum + r.length, 0);
  return (
    <>
      {disk.reason && (
        <Notice kind={disk.state === "attached" ? "warn" : "bad"}>
          <strong>{sentence(disk.reason)}</strong> {sentence(disk.remedy ?? "")}
          {operator && ["refused", "fenced"].includes(disk.state) && (disk.remedy ?? "").includes("--trust") && <Trust disk={disk} again={again} />}
          {operator && ["refused", "fenced"].includes(disk.state) && (disk.remedy ?? "").includes("--takeover") && <TakeOver disk={disk} again={again} />}
        </Notice>
      )}
      {disk.cannot_write_back && (
        <Notice kind="bad">
          <strong>Nothing could be written back for {seconds(disk.cannot_write_back.seconds)}.</strong>{" "}
          {sentence(disk.cannot_write_back.error)} {bytes(disk.cannot_write_back.dirty)} are only on flash.
        </Notice>
      )}
      {lost > 0 && (
        <Notice kind="bad">
          <strong>{bytes(lost)} were lost with the flash.</strong> They fail until the guest writes them again, or until
          the loss is accepted; then they read as the origin has them, which is older.{" "}
          {operator && (
            <Act act={() => post(diskPath(disk.name, "/accept-loss"))} done={again}>
              Accept the loss
            </Act>
          )}
        </Notice>
      )}
      {(disk.notices ?? []).map((text) => (
        <Notice kind="info" key={text}>
          {sentence(text)}
        </Notice>
      ))}
    </>
  );
}

/** Flash and origin do not agree, and only somebody who knows what happened can say which is right. */
const Trust = ({ disk, again }: { disk: Info; again: () => void }) => (
  <p>
    {(["flash", "origin"] as const).filter((side) => disk.remedy?.includes(`--trust ${side}`)).map((side) => (
      <Act key={side} act={() => patch(diskPath(disk.name), { trust: side })} done={again}>
        Trust the {side}
      </Act>
    ))}
  </p>
);

/** Another pool has its origin, and only somebody who knows that pool can say that it is gone. */
function TakeOver({ disk, again }: { disk: Info; again: () => void }) {
  const [asking, ask] = useState(false);
  return (
    <>
      {" "}
      <button type="button" class="danger" onClick={() => ask(true)}>
        Take it over…
      </button>
      <Ask open={asking} title={`Take ${disk.name} over?`} close={() => ask(false)}>
        <p>
          Another pool has its origin. What that one has on its flash and had not written back <strong>is missing then</strong>,
          and a machine that still runs there must not go on. Signs of life of it are looked for first, for some seconds.
        </p>
        <Act
          class="danger"
          act={() => patch(diskPath(disk.name), { takeover: true })}
          done={() => {
            ask(false);
            again();
          }}
        >
          Take it over
        </Act>{" "}
        <button type="button" onClick={() => ask(false)}>
          Leave it
        </button>
      </Ask>
    </>
  );
}

const SPANS = ["5min", "1h", "1d"];
const SPAN_NAMES: Record<string, string> = { "5min": "5 minutes", "1h": "hour", "1d": "day" };

function Rates({ name, stats, disk }: { name: string; stats: DiskStats; disk: Info }) {
  const samples = useOne(stats.spans);
  const [span, setSpan] = useState("5min");
  const rates = now(samples, (s) => s.counters);
  const window = stats.spans.find((s) => s.span === span);
  const latencies = stats.latencies.find((l) => l.span === span);
  return (
    <>
      <Tiles>
        <Tile label="Reads" value={rates ? rate(rates.reads) : "–"} more={rates && byteRate(rates.readBytes)} />
        <Tile label="Writes" value={rates ? rate(rates.writes) : "–"} more={rates && byteRate(rates.writeBytes)} />
        <Tile label="Hits" value={percent(window?.ratios.read_hit_ratio)} more={`of reads, last ${SPAN_NAMES[span]}`} />
        <Tile
          label="Speed-up"
          value={window?.ratios.speedup == null ? "–" : `${digits(window.ratios.speedup)} ×`}
          more="against no cache, estimated"
        />
        <Tile label="Cached" value={bytes(stats.cached)} more={percent(disk.size > 0 ? stats.cached / disk.size : 0)} />
        {disk.dirty_unknown ? (
          <Tile label="Dirty" value="unknown" more="it went with the flash" />
        ) : (
          <Tile label="Dirty" value={bytes(stats.dirty)} more={stats.dirty > 0 ? `for ${seconds(stats.dirty_for)}` : "clean"} />
        )}
      </Tiles>
      <Over samples={samples} disk={name} />
      <Card
        title="Latency"
        aside={
          <label>
            Last{" "}
            <select value={span} onChange={(e) => setSpan(e.currentTarget.value)}>
              {SPANS.map((s) => (
                <option key={s} value={s}>
                  {SPAN_NAMES[s]}
                </option>
              ))}
            </select>
          </label>
        }
      >
        <div class="scroll" tabIndex={0} role="region" aria-label="Latency, hits and misses apart">
          <table>
            <thead>
              <tr>
                <th scope="col">Requests</th>
                {["Number", "Mean", "Median", "90 %", "99 %", "99.9 %", "Longest"].map((h) => (
                  <th key={h} scope="col" class="number">
                    {h}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {(
                [
                  ["Reads that hit", latencies?.read_hit],
                  ["Reads that missed", latencies?.read_miss],
                  ["Writes that hit", latencies?.write_hit],
                  ["Writes that missed", latencies?.write_miss],
                ] as const
              ).map(([label, l]) => (
                <tr key={label}>
                  <th scope="row">{label}</th>
                  <td class="number">{l ? l.count.toLocaleString("en") : "–"}</td>
                  {[l?.mean_us, l?.p50_us, l?.p90_us, l?.p99_us, l?.p999_us, l?.max_us].map((us, i) => (
                    <td key={i} class="number">
                      {l && l.count > 0 ? micros(us) : "–"}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </Card>
    </>
  );
}

function WhatIf({ name }: { name: string }) {
  const live = useLive<AdviceReport>(diskPath(name, "/advice"), 15000);
  const operator = useOperator();
  return (
    <Card title="What more or less flash would do">
      <Shown live={live}>
        {(report) => {
          const advice = report.disks[0];
          if (!advice || advice.curve.length === 0) {
            return <p>{sentence(advice?.reason ?? "Too little was read yet to say")}</p>;
          }
          return (
            <>
              <Curve advice={advice} key={name} />
              {advice.reason && <p class="dim">{sentence(advice.reason)}</p>}
              {advice.mode && advice.mode.advised !== advice.mode.now && (
                <Suggestion text={`mode ${advice.mode.advised} instead of ${advice.mode.now}`} why={advice.mode.because} set={() => patch(diskPath(name), { mode: advice.mode!.advised })} />
              )}
              {advice.block_size && advice.block_size.advised !== advice.block_size.now && (
                <Suggestion
                  text={`cache blocks of ${bytes(advice.block_size.advised)} instead of ${bytes(advice.block_size.now)}`}
                  why={advice.block_size.because}
                  set={() => patch(diskPath(name), { block_size: advice.block_size!.advised })}
                />
              )}
              {operator && (
                <p>
                  Its share of the pool would be {bytes(advice.share.bytes)}.{" "}
                  <Act act={() => post(diskPath(name, "/advice/apply"))} done={live.again}>
                    Keep that for it
                  </Act>
                </p>
              )}
            </>
          );
        }}
      </Shown>
    </Card>
  );
}

function Suggestion({ text, why, set }: { text: string; why: string; set: () => Promise<unknown> }) {
  const operator = useOperator();
  return (
    <Notice kind="info">
      Advised: <strong>{text}</strong>. {sentence(why)} {operator && <Act act={set}>Set it</Act>}
    </Notice>
  );
}

interface AttachWay extends Way {
  over: string;
  when: string;
}

export const Attach = ({ name }: { name: string }) => (
  <Typed
    title="Give it to a virtual machine"
    word="For"
    choices={[
      ["qemu", "QEMU"],
      ["libvirt", "libvirt"],
      ["proxmox", "Proxmox VE"],
    ]}
    path={`/console/attach/${encodeURIComponent(name)}`}
    ways={(answer) => (answer as { ways: AttachWay[] }).ways}
    about={(way) => ({
      label: `Over ${way.over}`,
      lead: (
        <>
          <strong>Over {way.over}</strong>: {way.when}.
        </>
      ),
    })}
  />
);

function clientName(c: Schemas["ClientInfo"]) {
  return (c.address ?? c.command ?? (c.pid ? `process ${c.pid}` : "a client")) + (c.name ? ` (${c.name})` : "");
}

function Who({ disk }: { disk: Info }) {
  const clients = disk.clients ?? [];
  return (
    <Card title="Clients">
      {clients.length === 0 ? (
        <p>Nobody uses it.</p>
      ) : (
        <ul>
          {clients.map((c, i) => (
            <li key={i}>
              {c.kind}: {clientName(c)}
              {c.connections === 0
                ? ", not connected since the daemon started"
                : `, ${c.connections} ${c.connections === 1 ? "connection" : "connections"}, ${
                    c.writes ? "writes" : "only reads"
                  }, since ${clock(c.since * 1000)}`}
            </li>
          ))}
        </ul>
      )}
      {disk.link && (
        <p>
          The origin's server {disk.link.connected ? "answers" : "is gone"} for {seconds(disk.link.seconds)}; it was lost
          and found again {disk.link.reconnects} times.
        </p>
      )}
    </Card>
  );
}
