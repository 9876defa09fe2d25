import { useEffect, useRef, useState } from "preact/hooks";
import { Failure, logIn, type Session } from "../api";
import { Field, Said } from "../parts/ui";

export function Login({ link, into }: { link: string | null; into: (session: Session) => void }) {
  const [failure, setFailure] = useState<Failure | null>(null);
  const [busy, setBusy] = useState(false);
  const used = useRef(false);
  const enter = async (how: Parameters<typeof logIn>[0]) => {
    setBusy(true);
    setFailure(null);
    try {
      into(await logIn(how));
    } catch (e) {
      setFailure(e instanceof Failure ? e : new Failure("refused", String(e)));
      setBusy(false);
    }
  };
  useEffect(() => {
    if (!link || used.current) return;
    used.current = true;
    // It works once; nobody is to find it in the history.
    history.replaceState(null, "", `${location.pathname}#/`);
    dispatchEvent(new HashChangeEvent("hashchange"));
    void enter({ link });
  }, [link]);
  return (
    <main class="login" id="main">
      <h1>Hearth</h1>
      <form
        onSubmit={(e) => {
          e.preventDefault();
          const given = new FormData(e.currentTarget);
          void enter({ name: String(given.get("name")), password: String(given.get("password")) });
        }}
      >
        <Field label="Account">
          <input name="name" autocomplete="username" required maxLength={32} />
        </Field>
        <Field label="Password">
          <input name="password" type="password" autocomplete="current-password" required />
        </Field>
        <button class="main" disabled={busy} aria-busy={busy}>
          Log in
        </button>
      </form>
      {failure && <Said failure={failure} />}
      <p>
        No account? On the host, <code>hearth console open</code> prints a link that logs in once.
      </p>
    </main>
  );
}
