// Small pieces that every page is made of, and the states a page can be in.
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Failure } from "../api";
import type { Live } from "../live";

export function Notice({ kind, children }: { kind: "bad" | "warn" | "info" | "good"; children: ComponentChildren }) {
  return (
    <div class={`notice ${kind}`} role={kind === "bad" ? "alert" : "status"}>
      {children}
    </div>
  );
}

export function Said({ failure }: { failure: Failure }) {
  return (
    <Notice kind="bad">
      <strong>{failure.message}.</strong> {failure.remedy && <span>{sentence(failure.remedy)}</span>}
    </Notice>
  );
}

export const sentence = (text: string) => (text ? `${text[0]!.toUpperCase()}${text.slice(1).replace(/\.$/, "")}.` : "");

/** Whether the thing itself is shown, with a heading of its own, and not a word in its place. */
export const drawn = <T,>({ data, failure }: Live<T>) =>
  data !== null && failure?.trouble !== "denied" && failure?.trouble !== "missing";

/** Shows what there is to show: nothing yet, why there is nothing, or the thing; and that it is old if it is. */
export function Shown<T>({
  live,
  empty,
  children,
}: {
  live: Live<T>;
  /** What to say if there is nothing in it. */
  empty?: (data: T) => ComponentChildren;
  children: (data: T) => ComponentChildren;
}) {
  const { data, failure } = live;
  if (failure?.trouble === "denied") {
    return (
      <Notice kind="warn">
        <strong>You may not see this.</strong> {sentence(failure.remedy)}
      </Notice>
    );
  }
  // Also if it was there before.
  if (failure?.trouble === "missing") {
    return (
      <Notice kind="info">
        <strong>There is nothing here.</strong> {sentence(failure.message)}
      </Notice>
    );
  }
  if (data === null) {
    if (failure && failure.trouble !== "gone") return <Said failure={failure} />;
    return (
      <p class="loading" role="status">
        {failure ? "Waiting for the daemon…" : "Loading…"}
      </p>
    );
  }
  const nothing = empty?.(data);
  return (
    <>
      {failure && failure.trouble !== "gone" && <Said failure={failure} />}
      {nothing ? <div class="empty">{nothing}</div> : children(data)}
    </>
  );
}

export function Tile({ label, value, more }: { label: string; value: ComponentChildren; more?: ComponentChildren }) {
  return (
    <div class="tile">
      <dt>{label}</dt>
      <dd>
        {value}
        {more && <small>{more}</small>}
      </dd>
    </div>
  );
}

export const Tiles = ({ children }: { children: ComponentChildren }) => <dl class="tiles">{children}</dl>;

export function Card({ title, children, aside }: { title: string; children: ComponentChildren; aside?: ComponentChildren }) {
  return (
    <section class="card" aria-label={title}>
      <header>
        <h2>{title}</h2>
        {aside}
      </header>
      {children}
    </section>
  );
}

export function Bar({ label, value, of, text }: { label: string; value: number; of: number; text: string }) {
  const share = of > 0 ? Math.min(1, value / of) : 0;
  return (
    <div class="bar">
      <span>{label}</span>
      <meter min={0} max={1} value={share} aria-label={label} aria-valuetext={text} />
      <span class="number">{text}</span>
    </div>
  );
}

/** A button whose work takes a while, and may fail. */
export function Act({
  children,
  act,
  done,
  class: kind,
  disabled,
}: {
  children: ComponentChildren;
  act: () => Promise<unknown>;
  done?: () => void;
  class?: string;
  disabled?: boolean;
}) {
  const [busy, setBusy] = useState(false);
  const [failure, setFailure] = useState<Failure | null>(null);
  const go = async () => {
    setBusy(true);
    setFailure(null);
    try {
      await act();
      done?.();
    } catch (e) {
      setFailure(e instanceof Failure ? e : new Failure("refused", String(e)));
    }
    setBusy(false);
  };
  return (
    <>
      <button type="button" class={kind} disabled={busy || disabled} aria-busy={busy} onClick={go}>
        {children}
      </button>
      {failure && <Said failure={failure} />}
    </>
  );
}

/** What a second Enter may hit: a field if there is one, otherwise the button that changes nothing. */
function safest(dialog: HTMLDialogElement): HTMLElement | null | undefined {
  const field = dialog.querySelector<HTMLElement>("input, select, textarea");
  return field ?? [...dialog.querySelectorAll<HTMLElement>("button:not(.danger)")].pop();
}

/** Asks before something is done that cannot be undone. */
export function Ask({
  open,
  title,
  close,
  children,
}: {
  open: boolean;
  title: string;
  close: () => void;
  children: ComponentChildren;
}) {
  const ref = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const dialog = ref.current;
    if (open && dialog && !dialog.open) {
      dialog.showModal();
      safest(dialog)?.focus();
    }
    if (!open && dialog?.open) dialog.close();
  }, [open]);
  return (
    <dialog ref={ref} onClose={close} aria-label={title}>
      {open && (
        <>
          <h2>{title}</h2>
          {children}
        </>
      )}
    </dialog>
  );
}

export function Copy({ text }: { text: string }) {
  const [said, say] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      say("Copied");
    } catch {
      say("Mark the text and copy it by hand");
    }
    setTimeout(() => say(""), 3000);
  };
  return (
    <span class="copy">
      <button type="button" onClick={copy}>
        Copy
      </button>
      <span role="status">{said}</span>
    </span>
  );
}

export function Field({ label, hint, children }: { label: string; hint?: string; children: JSX.Element }) {
  return (
    <label class="field">
      <span>{label}</span>
      {children}
      {hint && <small>{hint}</small>}
    </label>
  );
}

export function State({ state }: { state: string }) {
  const kind = state === "attached" ? "good" : state === "flushing" || state === "removing" ? "info" : "bad";
  return <span class={`state ${kind}`}>{state}</span>;
}
