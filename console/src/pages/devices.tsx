// The flash: what is where, how each device does, and devices that come and go.
import type { Pool, Schemas, Stats } from "../api";
import { bytes, clock, count, digits, micros, percent, seconds } from "../format";
import { useLive } from "../live";
import { mood, type Report } from "../monitor";
import { Bar, Card, drawn, Notice, sentence, Shown, State, Tile, Tiles } from "../parts/ui";
import { Table } from "../parts/table";
import { useDisks, useOperator, useWorld } from "../state";
import { Change, Going, over, type FlashState } from "./reshape";

export function Devices() {
  const { pool, stats } = useWorld();
  return (
    <>
      {!drawn(pool) && <h1>Devices</h1>}
      <Shown live={pool}>{(data) => <Flash pool={data} stats={stats.data} again={pool.again} />}</Shown>
      <Judged />
      <Origins />
    </>
  );
}

type Device = Schemas["PoolDevice"];

const deviceMood = (d: Device) => (d.lost ? "bad" : d.slow ? "warn" : d.state === "emptying" ? "info" : "good");
const deviceState = (d: Device) => (d.lost ? "lost" : d.slow ? "slow" : d.state === "emptying" ? "emptying" : "in use");

/** Microseconds that one of them took. */
const mean = (us: number, n: number) => micros(n > 0 ? us / n : null);

function One({ device, alone }: { device: Device; alone: boolean }) {
  const { io } = device;
  const used = device.cached;
  return (
    <Card
      title={`Flash ${device.path}`}
      aside={<span class={`state ${deviceMood(device)}`}>{deviceState(device)}</span>}
    >
      {device.lost && (
        <Notice kind="bad">
          <strong>It is missing, failed, or older than the others.</strong> What is on it is not used.
        </Notice>
      )}
      {device.slow && !device.lost && (
        <Notice kind="warn">
          <strong>It answers slowly,</strong> and gets no more than it must.
        </Notice>
      )}
      <p class="dim">
        {device.model ? `${device.model}, ` : ""}
        {device.uuid}
      </p>
      {used != null && <Bar label="Used" value={used} of={device.log_bytes} text={`${bytes(used)} of ${bytes(device.log_bytes)}`} />}
      {device.dirty != null && !alone && <Bar label="Dirty" value={device.dirty} of={device.log_bytes} text={bytes(device.dirty)} />}
      {device.free_segments != null && (
        <Bar label="Free segments" value={device.free_segments} of={device.segments} text={`${count(device.free_segments)} of ${count(device.segments)}`} />
      )}
      {device.emptied_percent != null && (
        <Bar label="Emptied" value={device.emptied_percent} of={100} text={`${device.emptied_percent} %`} />
      )}
      <Tiles>
        <Tile label="Device" value={bytes(device.bytes)} more={`${bytes(device.log_bytes)} for data`} />
        {io && (
          <>
            <Tile label="Reads" value={mean(io.read_us, io.reads)} more={`in the mean; ${bytes(io.read_bytes)} since the start`} />
            <Tile label="Writes" value={mean(io.write_us, io.writes)} more={`in the mean; ${bytes(io.write_bytes)} since the start`} />
            <Tile label="Flushes" value={mean(io.flush_us, io.flushes)} more={`in the mean; ${count(io.flushes)} since the start`} />
            <Tile label="Errors" value={count(io.errors)} more="since the start" />
          </>
        )}
      </Tiles>
    </Card>
  );
}

function Flash({ pool, stats, again }: { pool: Pool; stats: Stats | null; again: () => void }) {
  const operator = useOperator();
  const of = stats?.pool;
  const state = useLive<FlashState>("/v1/pool/flash", 1500);
  const devices = pool.devices ?? [];
  const busy = !!state.data?.change && !over(state.data.change);
  const done = () => {
    state.again();
    again();
  };
  return (
    <>
      <header class="page">
        <h1>
          Devices <span class={`state ${of?.flash_failed ? "bad" : "good"}`}>{of?.flash_failed ? "failed" : pool.state}</span>
        </h1>
        {operator && !busy && state.data && <Change pool={pool} done={done} />}
      </header>
      {state.data?.change && <Going change={state.data.change} done={done} />}
      {(pool.notices ?? []).map((text) => (
        <Notice kind="warn" key={text}>
          {sentence(text)}
        </Notice>
      ))}
      {devices.map((device) => (
        <One key={device.uuid} device={device} alone={devices.length === 1} />
      ))}
      {of && (
        <Card title={devices.length > 1 ? "All flash together" : "What was written to flash"}>
          {pool.dirty_copies === 2 && (
            <p>
              {pool.clean_copies === 1 ? "What is dirty is on two devices, what is clean on one" : "Everything on flash is on two devices"}, as
              long as none is lost: either may die.
            </p>
          )}
          <Tiles>
            <Tile label="For cached data" value={bytes(pool.capacity ?? pool.log_bytes)} more={`${count(pool.segments)} segments of ${bytes(pool.segment_bytes)}`} />
            <Tile label="Reads take" value={micros(of.flash_read_us)} more="lately" />
            <Tile label="Endurance budget" value={of.endurance_used > 0 ? percent(of.endurance_used) : "–"} more="used up lately" />
            {(pool.promised ?? 0) > 0 && (
              <Tile label="Promised" value={bytes(pool.promised ?? 0)} more={`of ${bytes(pool.promised_most ?? 0)} at most, to disks that live on flash`} />
            )}
          </Tiles>
          <div class="scroll" tabIndex={0} role="region" aria-label="Bytes written and read, over time">
            <table>
              <thead>
                <tr>
                  <th scope="col">Over</th>
                  {["Written", "For clients", "Again", "Read", "Amplification", "Errors"].map((h) => (
                    <th key={h} scope="col" class="number">
                      {h}
                    </th>
                  ))}
                </tr>
              </thead>
              <tbody>
                {of.spans.map((s) => (
                  <tr key={s.span}>
                    <th scope="row">{s.span === "total" ? "since the start" : seconds(s.seconds)}</th>
                    <td class="number">{bytes(s.counters.flash_write_bytes)}</td>
                    <td class="number">{bytes(s.counters.flash_payload_bytes)}</td>
                    <td class="number">{bytes(s.counters.flash_reinsert_bytes)}</td>
                    <td class="number">{bytes(s.counters.flash_read_bytes)}</td>
                    <td class="number">{s.write_amplification == null ? "–" : digits(s.write_amplification)}</td>
                    <td class="number">{count(s.counters.flash_errors)}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </Card>
      )}
      <Card title="Pool">
        <Tiles>
          <Tile label="Label" value={pool.label || "–"} />
          <Tile label="Made" value={clock(pool.created * 1000)} />
          <Tile label="RAM when full" value={bytes(pool.ram)} />
          <Tile label="Data threads" value={pool.threads ?? "–"} more={pool.io ?? undefined} />
          {pool.recovery && (
            <Tile
              label="Last start"
              value={`${digits(pool.recovery.millis)} ms`}
              more={`${pool.recovery.how}: ${count(pool.recovery.cached_blocks)} blocks cached, ${count(pool.recovery.dirty_blocks)} dirty`}
            />
          )}
        </Tiles>
        <p class="dim">{pool.uuid}</p>
      </Card>
    </>
  );
}

/** Drives, arrays and file systems, where the second service looks at them. */
function Judged() {
  const live = useLive<Report>("/v1/health", 10000);
  const looked = (report: Report) => report.items.filter((i) => i.kind === "device" || i.kind === "file-system");
  return (
    <Card title="Drives, arrays and file systems">
      <Shown
        live={live}
        empty={(report) => looked(report).length === 0 && <p>None is known under the flash and the disks that are there now.</p>}
      >
        {(report) => (
          <ul class="reasons">
            {looked(report).map((item) => (
              <li key={`${item.kind} ${item.name}`}>
                <span class={`state ${mood(item.condition)}`}>{item.condition}</span> <code>{item.name}</code> {item.about}{" "}
                {(item.reasons ?? []).map((r) => (
                  <p key={r.code}>
                    {sentence(r.what)} {sentence(r.remedy ?? "")}
                  </p>
                ))}
              </li>
            ))}
          </ul>
        )}
      </Shown>
      {(live.data?.notes ?? []).map((note) => (
        <p class="dim" key={note}>
          {sentence(note)}
        </p>
      ))}
    </Card>
  );
}

function Origins() {
  const disks = useDisks();
  return (
    <Card title="Origins">
      <Shown live={disks} empty={(all) => all.length === 0 && <p>There are no disks yet.</p>}>
        {(all) => (
          <Table
            caption="Origins of all disks"
            rows={all}
            id={(d) => d.name}
            search={(d) => `${d.origin} ${d.name}`}
            columns={[
              { name: "Origin", by: (d) => d.origin, show: (d) => <code>{d.origin}</code> },
              { name: "Disk", by: (d) => d.name, show: (d) => <a href={`#/disks/${encodeURIComponent(d.name)}`}>{d.name}</a> },
              { name: "State", by: (d) => d.state, show: (d) => <State state={d.state} /> },
              {
                name: "Server",
                by: (d) => (d.link ? String(d.link.connected) : ""),
                show: (d) => (d.link ? (d.link.connected ? "answers" : "gone") : "this host"),
                wide: true,
              },
            ]}
          />
        )}
      </Shown>
    </Card>
  );
}
