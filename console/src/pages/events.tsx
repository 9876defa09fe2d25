import { useEffect, useMemo, useState } from "preact/hooks";
import type { EventInfo } from "../api";
import { clock } from "../format";
import { useLive } from "../live";
import { Shown } from "../parts/ui";

const KINDS = ["info", "notice", "warning", "error"] as const;

const MOST = 500;

/** Of both, each the oldest first: the newest, the newest first. */
function newest(daemon: EventInfo[], alerts: EventInfo[]): EventInfo[] {
  const all = [...daemon, ...alerts].reverse();
  return all.sort((a, b) => b.at - a.at).slice(0, MOST);
}

export function Events() {
  const [severity, setSeverity] = useState("info");
  const [disk, setDisk] = useState("");
  const [asked, setAsked] = useState("");
  useEffect(() => {
    const timer = setTimeout(() => setAsked(disk.trim()), 300);
    return () => clearTimeout(timer);
  }, [disk]);
  const question = useMemo(() => {
    const of = asked ? `&disk=${encodeURIComponent(asked).replace(/[!'()*~]/g, "")}` : "";
    return `limit=${MOST}&severity=${severity}${of}`;
  }, [severity, asked]);
  const daemon = useLive<EventInfo[]>(`/v1/events?${question}`, 3000);
  // What became of alerts is the second service's to tell: without it the rest is shown.
  const alerts = useLive<EventInfo[]>(`/v1/alerts/events?${question}`, 3000);
  const live = { ...daemon, data: daemon.data && newest(daemon.data, alerts.data ?? []) };
  return (
    <>
      <h1>Events</h1>
      <div class="tools">
        <label>
          At least{" "}
          <select value={severity} onChange={(e) => setSeverity(e.currentTarget.value)}>
            {KINDS.map((k) => (
              <option key={k}>{k}</option>
            ))}
          </select>
        </label>
        <label>
          Disk <input type="search" value={disk} onInput={(e) => setDisk(e.currentTarget.value)} />
        </label>
      </div>
      {alerts.failure !== null && alerts.failure.trouble !== "gone" && daemon.failure === null && (
        <p class="dim">What became of alerts is not among them: {alerts.failure.message}.</p>
      )}
      <Shown live={live} empty={(all) => all.length === 0 && <p>Nothing of that kind has happened.</p>}>
        {(all) => (
          <ol class="events" aria-label="Events, the newest first">
            {all.map((e) => (
              <li key={`${e.event} ${e.id}`}>
                <time dateTime={new Date(e.at).toISOString()}>{clock(e.at)}</time>
                <span class={`state ${e.severity === "error" ? "bad" : e.severity === "warning" ? "warn" : "info"}`}>
                  {e.severity}
                </span>
                <span>
                  {e.disk && <a href={`#/disks/${encodeURIComponent(e.disk)}`}>{e.disk}</a>} {e.text}{" "}
                  <small class="dim">{e.event}</small>
                </span>
              </li>
            ))}
          </ol>
        )}
      </Shown>
    </>
  );
}
