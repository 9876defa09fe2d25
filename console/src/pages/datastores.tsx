// Directories that are served whole, over NFS: all of them, and one with its files, who may come, and what holds for
// which files.
import { useState } from "preact/hooks";
import { Failure, patch, post, type AdviceReport, type Datastore, type Schemas } from "../api";
import { bytes, count, micros, parseSize, percent } from "../format";
import { useLive } from "../live";
import { Table, type Column } from "../parts/table";
import { Typed, type Way } from "../parts/typed";
import { Act, Card, drawn, Field, Notice, sentence, Shown, Tile, Tiles } from "../parts/ui";
import { useOperator, useWorld } from "../state";
import { MODES } from "./settings";

type File = Schemas["FileReport"];
type Rule = Schemas["FileRule"];
type Tree = Schemas["TreeInfo"];

export const storePath = (name: string, rest = "") => `/v1/datastores/${encodeURIComponent(name)}${rest}`;
export const storePage = (name: string) => `#/datastores/${encodeURIComponent(name)}`;

/** Of more files than so many no list is asked for by itself. */
export const FILES_MOST = 2000;

export function StoreState({ store }: { store: Datastore }) {
  const kind = store.served ? (store.flushing ? "info" : "good") : "bad";
  return <span class={`state ${kind}`}>{store.served ? (store.flushing ? "flushing" : "served") : "not served"}</span>;
}

const COLUMNS: Column<Datastore>[] = [
  { name: "Name", by: (s) => s.name, show: (s) => <a href={storePage(s.name)}>{s.name}</a> },
  { name: "State", by: (s) => String(s.served), show: (s) => <StoreState store={s} /> },
  { name: "Directory", wide: true, by: (s) => s.directory, show: (s) => <code>{s.directory}</code> },
  { name: "Listens on", wide: true, by: (s) => s.listen, show: (s) => s.listen },
  { name: "Files", number: true, by: (s) => s.disks, show: (s) => count(s.disks) },
  { name: "In use", number: true, by: (s) => s.open, show: (s) => count(s.open) },
  { name: "Dirty", number: true, by: (s) => s.dirty, show: (s) => bytes(s.dirty) },
];

export function Datastores() {
  const { stores } = useWorld();
  return (
    <>
      <h1>Datastores</h1>
      <Shown
        live={stores}
        empty={(all) =>
          all.length === 0 && (
            <>
              <p>No directory is served over NFS yet.</p>
              <p>
                On the host, <code>hearth datastore add /srv/vms --nfs</code> serves one as it is; its large files become
                disks of the cache.
              </p>
            </>
          )
        }
      >
        {(all) => <Table caption="Datastores" columns={COLUMNS} rows={all} id={(s) => s.name} />}
      </Shown>
    </>
  );
}

export function OneStore({ name }: { name: string }) {
  const live = useLive<Datastore>(storePath(name), 1500);
  return (
    <>
      <p class="path">
        <a href="#/datastores">Datastores</a> / {name}
      </p>
      {!drawn(live) && <h1>{name}</h1>}
      <Shown live={live}>
        {(store) => (
          <>
            <Head store={store} again={live.again} />
            <Trees trees={store.trees ?? []} />
            <Files store={store} />
            <Gains name={name} />
            <div class="columns">
              <Rules store={store} again={live.again} />
              <Who store={store} />
            </div>
            <Mount name={name} />
          </>
        )}
      </Shown>
    </>
  );
}

function Head({ store, again }: { store: Datastore; again: () => void }) {
  const operator = useOperator();
  const path = storePath(store.name);
  return (
    <>
      <header class="page">
        <h1>
          {store.name} <StoreState store={store} />
        </h1>
        {operator && (
          <div class="acts">
            <Act disabled={store.flushing} act={() => post(`${path}/flush`)} done={again}>
              Flush
            </Act>
            <Act
              act={async () => {
                await patch(path, { hold: !store.hold });
                // What was answered before is there only after a flush.
                if (!store.hold) await post(`${path}/flush`);
              }}
              done={again}
            >
              {store.hold ? "Hold no longer" : "Flush and hold"}
            </Act>
          </div>
        )}
      </header>
      <p class="dim">
        <code>{store.directory}</code>, mounted as <code>{store.path}</code> from {store.listen}
        {store.read_only ? ", read-only" : ""}
      </p>
      <Flushing store={store} />
      {store.reason && (
        <Notice kind="bad">
          <strong>{sentence(store.reason)}</strong> {sentence(store.remedy ?? "")}
        </Notice>
      )}
      {(store.notices ?? []).map((text) => (
        <Notice kind="warn" key={text}>
          {sentence(text)}
        </Notice>
      ))}
      {store.hold && (
        <Notice kind="info">
          <strong>It is held.</strong> Writes are answered when the directory has them, at the speed of the disks below, so
          that what is copied off it is whole.
        </Notice>
      )}
      <Tiles>
        <Tile label="Files that are disks" value={count(store.disks)} more={`${count(store.open)} in use`} />
        <Tile label="Dirty" value={bytes(store.dirty)} more={store.dirty > 0 ? "the directory lacks so much" : "the directory has everything"} />
        <Tile label="Port" value={store.listen.split(":").pop() ?? ""} more={store.portmapper ? "a portmapper tells it" : "no portmapper tells it"} />
      </Tiles>
    </>
  );
}

function Flushing({ store }: { store: Datastore }) {
  const [whole, setWhole] = useState(0);
  if (!store.flushing) {
    if (whole > 0) setWhole(0);
    return null;
  }
  if (store.dirty > whole) setWhole(store.dirty);
  const most = Math.max(whole, store.dirty, 1);
  const text = `${bytes(store.dirty)} left`;
  return (
    <p class="progress" role="status">
      <progress max={most} value={most - store.dirty} aria-label={`Flushing: ${text}`} /> {text}
    </p>
  );
}

function Trees({ trees }: { trees: Tree[] }) {
  if (trees.length === 0) return null;
  return (
    <Card title="Two directories">
      <p class="dim">Each of them, alone, is the datastore.</p>
      <ul class="legs">
        {trees.map((tree) => (
          <li key={tree.directory} aria-label={`Directory ${tree.directory}`}>
            <span>
              <span class={`state ${tree.state === "current" ? "good" : tree.state === "out" ? "bad" : "info"}`}>{tree.state}</span>{" "}
              <code>{tree.directory}</code>{" "}
              {tree.state === "resyncing" && (
                <span role="status">
                  {tree.missing == null ? "it is looked at what it lacks" : `${count(tree.missing)} directories, files and parts of files to go`}
                </span>
              )}
            </span>
            {tree.reason && <strong>{sentence(tree.reason)}</strong>}
          </li>
        ))}
      </ul>
    </Card>
  );
}

function pinned(file: File): string {
  if (file.pin == null) return "";
  if (file.pin === "filled") return "all";
  if (file.pin === "no-room") return "no room";
  return percent(Math.min(0.99, file.cached / Math.max(1, file.size)));
}

const reads = (f: File) => f.counters.read_hits + f.counters.read_partial_hits + f.counters.read_misses;

const FILES: Column<File>[] = [
  { name: "File", by: (f) => f.path, show: (f) => <code>{f.path}</code> },
  { name: "Used", by: (f) => (f.open ? "in use" : ""), show: (f) => (f.open ? "in use" : "at rest") },
  { name: "Size", number: true, wide: true, by: (f) => f.size, show: (f) => bytes(f.size) },
  { name: "Mode", wide: true, by: (f) => (f.scratch ? "scratch" : f.mode), show: (f) => (f.scratch ? "scratch" : f.mode) },
  { name: "Cached", number: true, by: (f) => f.cached, show: (f) => bytes(f.cached) },
  { name: "Dirty", number: true, by: (f) => f.dirty, show: (f) => bytes(f.dirty) },
  { name: "Reads", number: true, wide: true, by: reads, show: (f) => count(reads(f)) },
  { name: "Hits", number: true, by: (f) => f.ratios.read_hit_ratio ?? null, show: (f) => percent(f.ratios.read_hit_ratio) },
  { name: "Read", number: true, wide: true, by: (f) => f.ratios.read_mean_us ?? null, show: (f) => micros(f.ratios.read_mean_us) },
  { name: "Pinned", wide: true, by: pinned, show: pinned },
];

function Files({ store }: { store: Datastore }) {
  const few = store.disks <= FILES_MOST;
  const [wanted, want] = useState(false);
  const live = useLive<File[]>(few || wanted ? storePath(store.name, "/files") : null, few ? 4000 : 30000);
  return (
    <Card title="Files that are disks">
      {!few && !wanted ? (
        <p>
          There are {count(store.disks)}.{" "}
          <button type="button" onClick={() => want(true)}>
            List them
          </button>
        </p>
      ) : (
        <Shown live={live} empty={(all) => all.length === 0 && <p>No file was used yet: one becomes a disk when it first is.</p>}>
          {(all) => <Table caption={`Files of ${store.name}`} columns={FILES} rows={all} id={(f) => f.path} search={(f) => f.path} />}
        </Shown>
      )}
    </Card>
  );
}

type One = NonNullable<AdviceReport["files"]>[number];

const GAINS: Column<One>[] = [
  { name: "File", by: (a) => a.name, show: (a) => <code>{a.name}</code> },
  { name: "Working set", number: true, by: (a) => a.working_set, show: (a) => bytes(a.working_set) },
  { name: "Now", number: true, by: (a) => a.present.bytes, show: (a) => bytes(a.present.bytes) },
  { name: "Hits now", number: true, by: (a) => a.present.hit_ratio, show: (a) => percent(a.present.hit_ratio) },
  { name: "Advised", number: true, wide: true, by: (a) => a.advised.bytes, show: (a) => bytes(a.advised.bytes) },
  { name: "Hits then", number: true, wide: true, by: (a) => a.advised.hit_ratio, show: (a) => percent(a.advised.hit_ratio) },
];

/** What more or less flash would do for files in use; nothing, as long as too little was read to say. */
function Gains({ name }: { name: string }) {
  const live = useLive<AdviceReport>(storePath(name, "/advice"), 15000);
  const known = (live.data?.files ?? []).filter((a) => a.curve.length > 0);
  const broken = live.failure !== null && live.failure.trouble !== "gone";
  if (!broken && known.length === 0) return null;
  return (
    <Card title="What flash does for files in use">
      <Shown live={live}>
        {() => (
          <>
            <Table caption="What flash does for files in use" columns={GAINS} rows={known} id={(a) => a.name} />
            <p class="dim">It is not applied to files: what holds for them is said by name, below.</p>
          </>
        )}
      </Shown>
    </Card>
  );
}

function told(rule: Rule): string {
  const parts: string[] = [];
  if (rule.mode) parts.push(rule.mode);
  if (rule.pin != null) parts.push(rule.pin ? "pinned" : "not pinned");
  if (rule.scratch != null) parts.push(rule.scratch ? "scratch" : "not scratch");
  if (rule.block_size != null) parts.push(`cache blocks of ${bytes(rule.block_size)}`);
  if (rule.max != null) parts.push(rule.max === 0 ? "no limit" : `at most ${bytes(rule.max)} of flash`);
  if (rule.seq_cutoff != null) {
    parts.push(rule.seq_cutoff === 0 ? "all sequential reads are cached" : `sequential reads up to ${bytes(rule.seq_cutoff)} are cached`);
  }
  return parts.join(", ");
}

function Rules({ store, again }: { store: Datastore; again: () => void }) {
  const operator = useOperator();
  const rules = store.rules ?? [];
  const path = storePath(store.name);
  const [pattern, setPattern] = useState("");
  const [mode, setMode] = useState("");
  const [max, setMax] = useState("");
  const [pin, setPin] = useState("");
  const save = () => {
    const size = max.trim() === "" ? undefined : parseSize(max);
    if (size === null) throw new Failure("refused", `“${max}” is no size; type 512M or 1.5G`);
    const rule = { match: pattern.trim(), mode: mode || undefined, max: size, pin: pin === "" ? undefined : pin === "yes" };
    if (!rule.mode && rule.max === undefined && rule.pin === undefined) {
      throw new Failure("refused", "Nothing is said of these files", "choose a mode, a limit or whether they are pinned");
    }
    return patch(path, { rule });
  };
  return (
    <Card title="Settings of files by name">
      {rules.length === 0 ? (
        <p>Nothing is said of any file: all are cached write-back.</p>
      ) : (
        <ul class="legs">
          {rules.map((rule) => (
            <li key={rule.match}>
              <span>
                <code>{rule.match}</code>: {told(rule)}{" "}
                {operator && (
                  <Act act={() => patch(path, { unmatch: rule.match })} done={again}>
                    Forget<span class="hidden"> {rule.match}</span>
                  </Act>
                )}
              </span>
            </li>
          ))}
        </ul>
      )}
      {operator && (
        <details>
          <summary>Say something of more files</summary>
          <Field label="Files like" hint="*.iso wherever it is, database/* of one directory; of several that fit the last holds">
            <input value={pattern} onInput={(e) => setPattern(e.currentTarget.value)} />
          </Field>
          <Field label="Cache mode">
            <select value={mode} onChange={(e) => setMode(e.currentTarget.value)}>
              <option value="">as before</option>
              {MODES.filter((m) => m !== "write-back-ordered").map((m) => (
                <option key={m}>{m}</option>
              ))}
            </select>
          </Field>
          <Field label="Most flash each may use" hint="Empty: as before; 0: no limit">
            <input value={max} onInput={(e) => setMax(e.currentTarget.value)} />
          </Field>
          <Field label="All of it on flash" hint="What is missing is read in, and none of it is evicted">
            <select value={pin} onChange={(e) => setPin(e.currentTarget.value)}>
              <option value="">as before</option>
              <option value="yes">pinned</option>
              <option value="no">not pinned</option>
            </select>
          </Field>
          <Act
            disabled={!pattern.trim()}
            act={async () => save()}
            done={() => {
              setPattern("");
              again();
            }}
          >
            Say so
          </Act>
        </details>
      )}
    </Card>
  );
}

function Who({ store }: { store: Datastore }) {
  return (
    <Card title="Who may come">
      {store.clients.length === 0 ? (
        <p>Nobody.</p>
      ) : (
        <ul>
          {store.clients.map((client) => (
            <li key={client.network}>
              <code>{client.network}</code>: {client.write ? "reads and writes" : "only reads"}
              {client.root ? ", may be root" : ""}
              {client.all_squash ? `, all users count as user ${client.anonuid}, group ${client.anongid}` : ""}
              {client.insecure ? ", from any port of this host" : ""}
            </li>
          ))}
        </ul>
      )}
      <p class="dim">
        To allow it, run on the host: <code>hearth datastore set {store.name} --client HOST=rw,no_root_squash</code>.
      </p>
    </Card>
  );
}

const Mount = ({ name }: { name: string }) => (
  <Typed
    title="Mount it"
    word="On"
    choices={[
      ["esxi", "ESXi"],
      ["linux", "Linux"],
      ["proxmox", "Proxmox VE"],
    ]}
    path={`/console/mount/${encodeURIComponent(name)}`}
    ways={(answer) => [answer as Way]}
  />
);
