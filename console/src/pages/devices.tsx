// The flash, and what the daemon has to say of it.
import type { Pool, Stats } from "../api";
import { bytes, clock, count, digits, micros, percent, seconds } from "../format";
import { useLive } from "../live";
import { mood, type Report } from "../monitor";
import { Bar, Card, Notice, sentence, Shown, State, Tile, Tiles } from "../parts/ui";
import { Table } from "../parts/table";
import { useWorld } from "../state";

export function Devices() {
  const { pool, stats } = useWorld();
  return (
    <>
      <h1>Devices</h1>
      <Shown live={pool}>{(data) => <Flash pool={data} stats={stats.data} />}</Shown>
      <Judged />
      <Origins />
    </>
  );
}

function Flash({ pool, stats }: { pool: Pool; stats: Stats | null }) {
  const of = stats?.pool;
  return (
    <>
      {(pool.flash ?? []).map((device) => (
        <Card
          key={device}
          title={`Flash ${device}`}
          aside={<span class={`state ${of?.flash_failed ? "bad" : "good"}`}>{of?.flash_failed ? "failed" : pool.state}</span>}
        >
          <Tiles>
            <Tile label="Device" value={bytes(pool.device_bytes)} />
            <Tile label="For cached data" value={bytes(pool.capacity)} more={`${count(pool.segments)} segments of ${bytes(pool.segment_bytes)}`} />
            <Tile label="Reads take" value={micros(of?.flash_read_us)} more="lately" />
            <Tile label="Endurance budget" value={of && of.endurance_used > 0 ? percent(of.endurance_used) : "–"} more="used up lately" />
          </Tiles>
          {of && (
            <>
              <Bar label="Used" value={of.cached} of={of.capacity} text={`${bytes(of.cached)} of ${bytes(of.capacity)}`} />
              <Bar label="Free segments" value={of.free_segments} of={of.segments} text={`${count(of.free_segments)} of ${count(of.segments)}`} />
              <div class="scroll" tabIndex={0} role="region" aria-label="What was written to flash">
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
            </>
          )}
          {(pool.notices ?? []).map((text) => (
            <Notice kind="warn" key={text}>
              {sentence(text)}
            </Notice>
          ))}
        </Card>
      ))}
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
  const items = (live.data?.items ?? []).filter((i) => i.kind === "device" || i.kind === "file-system");
  if (live.failure || items.length === 0) return null;
  return (
    <Card title="Drives, arrays and file systems">
      <ul class="reasons">
        {items.map((item) => (
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
      {(live.data?.notes ?? []).map((note) => (
        <p class="dim" key={note}>
          {sentence(note)}
        </p>
      ))}
    </Card>
  );
}

function Origins() {
  const { disks } = useWorld();
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
