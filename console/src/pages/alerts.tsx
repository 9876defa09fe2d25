// What was told to people, and whether it arrived.
import { useState } from "preact/hooks";
import { post } from "../api";
import { clock } from "../format";
import { useLive } from "../live";
import { mood, type Alert, type Alerts as All } from "../monitor";
import { Act, Card, Notice, sentence, Shown } from "../parts/ui";
import { useOperator } from "../state";

export function Alerts() {
  const live = useLive<All>("/v1/alerts", 5000);
  const operator = useOperator();
  const [sent, setSent] = useState<string[] | null>(null);
  return (
    <>
      <header class="page">
        <h1>Alerts</h1>
        {operator && live.data && (
          <Act
            act={async () => setSent((await post<{ ways: string[] }>("/v1/alerts/test")).ways)}
            done={live.again}
          >
            Send a test
          </Act>
        )}
      </header>
      {sent && (
        <Notice kind={sent.length > 0 ? "good" : "warn"}>
          {sent.length > 0 ? `A test is on its way: ${sent.join(", ")}.` : "Alerts have no way to go; see docs/alerts.md."}
        </Notice>
      )}
      <Shown live={live}>
        {(all) => (
          <>
            <Card title="What is wrong now">
              <List alerts={all.open} none="Nothing is wrong that somebody would be told of." />
            </Card>
            <Card title="Ways">
              {all.ways.length === 0 ? (
                <p>Nobody is told yet: no mail, webhook or ntfy is set up.</p>
              ) : (
                <ul>
                  {all.ways.map((w) => (
                    <li key={w.way}>
                      <code>{w.way}</code>: {w.waiting === 0 ? "everything has arrived" : `${w.waiting} have not arrived`}
                      {w.error && <Notice kind="bad">{sentence(w.error)}</Notice>}
                    </li>
                  ))}
                </ul>
              )}
              {!!all.untold && <p>{all.untold} things wait for the next message.</p>}
              {all.waiting.map((m) => (
                <p key={`${m.way} ${m.id}`} class="dim">
                  {m.subject}, to {m.way}: tried {m.attempts} times, again at {clock(m.next)}
                </p>
              ))}
            </Card>
            <Card title="What was">
              <List alerts={[...all.past].reverse()} none="Nothing yet." />
            </Card>
          </>
        )}
      </Shown>
    </>
  );
}

function List({ alerts, none }: { alerts: Alert[]; none: string }) {
  if (alerts.length === 0) return <p>{none}</p>;
  return (
    <ul class="reasons">
      {alerts.map((a) => (
        <li key={`${a.kind} ${a.name} ${a.reason.code} ${a.since}`} class={a.ended ? "info" : mood(a.reason.condition)}>
          {a.kind === "disk" ? <a href={`#/disks/${encodeURIComponent(a.name)}`}>{a.name}</a> : `${a.kind} ${a.name}`}:{" "}
          <strong>{sentence(a.reason.what)}</strong> {sentence(a.reason.remedy ?? "")}{" "}
          <small>
            {clock(a.since)}
            {a.ended ? ` to ${clock(a.ended)}` : ""}
          </small>
        </li>
      ))}
    </ul>
  );
}
