// The frame around the pages: which one is shown, who is logged in, and whether the daemon is there.
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { logOut, onOut, whoAmI, type Session } from "./api";
import { Add } from "./pages/add";
import { Advice } from "./pages/advice";
import { Alerts } from "./pages/alerts";
import { Datastores, OneStore } from "./pages/datastores";
import { Devices } from "./pages/devices";
import { Disk } from "./pages/disk";
import { Disks } from "./pages/disks";
import { Events } from "./pages/events";
import { Login } from "./pages/login";
import { Memory } from "./pages/memory";
import { Overview } from "./pages/overview";
import { theme, turn, useTheme } from "./parts/theme";
import { Notice } from "./parts/ui";
import { Here, useTheWorld } from "./state";
import "./style.css";

const PAGES = [
  ["", "Overview", Overview],
  ["disks", "Disks", Disks],
  ["datastores", "Datastores", Datastores],
  ["devices", "Devices", Devices],
  ["memory", "Memory", Memory],
  ["events", "Events", Events],
  ["alerts", "Alerts", Alerts],
  ["advice", "Advice", Advice],
] as const;

const parts = () =>
  location.hash
    .replace(/^#\/?/, "")
    .split("/")
    .map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    });

function useParts(): string[] {
  const [now, set] = useState(parts());
  useEffect(() => {
    const update = () => set(parts());
    addEventListener("hashchange", update);
    // The address may have changed between the first rendering and this effect.
    update();
    return () => removeEventListener("hashchange", update);
  }, []);
  return now;
}

function Frame({ session, out }: { session: Session; out: () => void }) {
  const world = useTheWorld(session);
  const [first = "", second] = useParts();
  const main = useRef<HTMLElement>(null);
  const shown = useRef(false);
  useTheme();
  const here = `${first}/${second ?? ""}`;
  useEffect(() => {
    const page = PAGES.find(([path]) => path === first)?.[1];
    document.title = `${second || page || (first === "add" ? "Add a disk" : "Hearth")} – ${session.host} – Hearth`;
    // Who cannot see that the page is another one hears it.
    if (shown.current) main.current?.focus();
    shown.current = true;
  }, [here]);
  const gone = world.stats.failure?.trouble === "gone";
  const Page = PAGES.find(([path]) => path === first)?.[2];
  return (
    <Here.Provider value={world}>
      <a class="skip" href="#main" onClick={(e) => { e.preventDefault(); main.current?.focus(); }}>
        To the content
      </a>
      <nav aria-label="Pages">
        <a class="brand" href="#/">
          Hearth <span class="host">{session.host}</span>
        </a>
        <ul>
          {PAGES.map(([path, name]) => (
            <li key={path}>
              <a href={`#/${path}`} aria-current={first === path || (path === "disks" && first === "add") ? "page" : undefined}>
                {name}
              </a>
            </li>
          ))}
        </ul>
        <div class="me">
          <span>
            {session.name} ({session.role})
          </span>
          <button type="button" onClick={turn}>
            {theme() === "dark" ? "Light" : "Dark"}
          </button>
          <button type="button" onClick={() => void logOut().finally(out)}>
            Log out
          </button>
        </div>
      </nav>
      <main id="main" ref={main} tabIndex={-1}>
        {gone && (
          <Notice kind="bad">
            <strong>{world.stats.failure!.message}.</strong>{" "}
            {world.stats.data ? "What is shown is from before; it is asked again by itself." : "It is asked again by itself."}
          </Notice>
        )}
        {first === "disks" && second ? (
          <Disk name={second} key={second} />
        ) : first === "datastores" && second ? (
          <OneStore name={second} key={second} />
        ) : first === "add" ? (
          <Add />
        ) : Page ? (
          <Page />
        ) : (
          <p class="empty">There is no such page.</p>
        )}
      </main>
    </Here.Provider>
  );
}

function App() {
  const [session, setSession] = useState<Session | null | "asking" | "gone">("asking");
  const [first, second] = useParts();
  const link = first === "login" && second ? second : null;
  useEffect(() => {
    onOut(() => setSession(null));
    let timer = 0;
    const ask = async () => {
      try {
        setSession(await whoAmI());
      } catch {
        setSession("gone");
        timer = window.setTimeout(ask, 2000);
      }
    };
    if (link) setSession(null);
    else void ask();
    return () => clearTimeout(timer);
  }, []);
  if (session === "asking") return <p class="loading" role="status">Loading…</p>;
  if (session === "gone") {
    return (
      <main class="login">
        <h1>Hearth</h1>
        <Notice kind="bad">The console does not answer. It is asked again by itself.</Notice>
      </main>
    );
  }
  if (session === null || link) {
    return (
      <Login
        link={link}
        into={setSession}
      />
    );
  }
  return <Frame session={session} out={() => setSession(null)} />;
}

const root = document.getElementById("app");
if (root) {
  root.textContent = "";
  render(<App />, root);
}
