// A flash device comes, goes, or takes another's place, while the pool is served; one at a time.
import { useState } from "preact/hooks";
import { Failure, post, type Pool, type Schemas } from "../api";
import { bytes, byteRate, parseSize, seconds } from "../format";
import { Act, Ask, Field, Notice, Said, sentence } from "../parts/ui";
import { useOperator, useWorld } from "../state";

export type FlashState = Schemas["FlashState"];
type Progress = Schemas["FlashProgress"];
type Action = Schemas["FlashAction"];

export const over = (change: Progress) => change.stage === "failed" || change.stage === "called-off";

const STAGES: Record<string, string> = {
  preparing: "The new device is prepared",
  copying: "It is copied to the new device",
  emptying: "The device is emptied",
  switching: "The daemon begins anew with the other devices; clients wait for a moment",
};

export function Going({ change, done }: { change: Progress; done: () => void }) {
  const operator = useOperator();
  if (change.stage === "failed") {
    return (
      <Notice kind="bad">
        <strong>{sentence(`${change.what}: it failed`)}</strong> {sentence(change.error?.error ?? "")} {sentence(change.error?.remedy ?? "")}
      </Notice>
    );
  }
  if (change.stage === "called-off") {
    return <Notice kind="info">{sentence(`${change.what}: it was called off`)} The pool is as it was before.</Notice>;
  }
  const left = Math.max(0, change.total - change.done);
  const text =
    change.total > 0
      ? `${bytes(left)} left at ${byteRate(change.bytes_per_second)}${change.eta_seconds == null ? "" : `, ${seconds(change.eta_seconds)}`}`
      : "";
  return (
    <Notice kind="info">
      <strong>{sentence(change.what)}</strong> {STAGES[change.stage] ?? change.stage}.{" "}
      {change.total > 0 && (
        <span class="progress">
          <progress max={change.total} value={change.done} aria-label={`${change.what}: ${text}`} /> {text}
        </span>
      )}{" "}
      {operator && change.stage !== "switching" && (
        <Act act={() => post("/v1/pool/flash/cancel")} done={done}>
          Call it off
        </Act>
      )}
    </Notice>
  );
}

export function Change({ pool, done }: { pool: Pool; done: () => void }) {
  const [asking, ask] = useState<Action | null>(null);
  const several = (pool.devices ?? []).length > 1;
  const close = () => ask(null);
  const title = asking === "add" ? "Add a flash device" : asking === "replace" ? "Replace a flash device" : "Take a flash device out";
  return (
    <div class="acts">
      <button type="button" onClick={() => ask("add")}>
        Add a device…
      </button>
      <button type="button" onClick={() => ask("replace")}>
        Replace…
      </button>
      {several && (
        <button type="button" class="danger" onClick={() => ask("remove")}>
          Take out…
        </button>
      )}
      <Ask open={asking !== null} title={title} close={close}>
        {asking && (
          <Dialog
            action={asking}
            pool={pool}
            close={close}
            done={() => {
              close();
              done();
            }}
          />
        )}
      </Ask>
    </div>
  );
}

function Dialog({ action, pool, close, done }: { action: Action; pool: Pool; close: () => void; done: () => void }) {
  const { session } = useWorld();
  const devices = pool.devices ?? [];
  const [old, setOld] = useState(devices[devices.length - 1]?.path ?? "");
  const [next, setNext] = useState("");
  const [size, setSize] = useState("");
  // Refused because clients would have to connect again: they are asked about, once.
  const [risk, setRisk] = useState<Failure | null>(null);
  const comes = action !== "remove";
  const go = async (yes: boolean) => {
    const body: Schemas["FlashChange"] = { action, yes };
    if (comes) {
      body.new = next.trim();
      if (size.trim()) {
        const wanted = parseSize(size);
        if (wanted === null) throw new Failure("refused", `“${size}” is no size; type 512M or 40G`);
        body.size = wanted;
      }
    }
    if (action !== "add") body.old = old;
    try {
      await post("/v1/pool/flash", body);
    } catch (e) {
      if (!(e instanceof Failure) || yes || !e.message.includes("connect again")) throw e;
      setRisk(new Failure("refused", e.message, "see that they can, or stop them first"));
      throw new Failure("refused", "Nothing was changed yet");
    }
  };
  return (
    <>
      <p>
        {action === "add" && "What is cached stays where it is; the new device takes its share of what comes."}
        {action === "replace" && "What is on the old device is copied to the new one while the pool is used."}
        {action === "remove" && "What is on it is moved to the others, or to the origins, while the pool is used."} At the end
        clients wait for a moment, while the daemon begins anew.
      </p>
      {action !== "add" && (
        <Field label={action === "replace" ? "Old device" : "Device"}>
          <select value={old} onChange={(e) => setOld(e.currentTarget.value)}>
            {devices.map((d) => (
              <option key={d.uuid}>{d.path}</option>
            ))}
          </select>
        </Field>
      )}
      {comes && (
        <>
          <Field
            label="New device"
            hint={session.browse ? "A listed block device, or a file below a directory the console may reach" : "The console may reach none yet: hearth console enable --allow-path lists them"}
          >
            <input value={next} onInput={(e) => setNext(e.currentTarget.value)} />
          </Field>
          <Field label="Size of a new file" hint="40G, say; empty for a device or file that is there">
            <input value={size} onInput={(e) => setSize(e.currentTarget.value)} />
          </Field>
        </>
      )}
      {risk && <Said failure={risk} />}
      <p class="acts">
        <Act class={action === "remove" ? "danger" : "main"} disabled={comes && !next.trim()} act={() => go(risk !== null)} done={done}>
          {risk ? "Do it nevertheless" : action === "add" ? "Add it" : action === "replace" ? "Replace it" : "Take it out"}
        </Act>
        <button type="button" onClick={close}>
          Leave it
        </button>
      </p>
    </>
  );
}
