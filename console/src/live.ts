// What is shown is asked for again and again, for as long as somebody looks at it.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { call, Failure } from "./api";

export interface Live<T> {
  /** The newest answer there was. */
  data: T | null;
  /** Why there is no newer one. */
  failure: Failure | null;
  /** Ask now; done when an answer to a question asked after the call is shown, or there was none. */
  again: () => Promise<void>;
}

/** What `path` answers, every `pace` milliseconds; nothing is asked without a path, or while the page is hidden. */
export function useLive<T>(path: string | null, pace = 2000): Live<T> {
  const [state, set] = useState<{ of: string | null; data: T | null; failure: Failure | null }>({
    of: path,
    data: null,
    failure: null,
  });
  const ask = useRef<() => Promise<void>>(async () => {});
  useEffect(() => {
    if (path === null) return;
    let over = false;
    let timer = 0;
    let asking: Promise<void> | null = null;
    const load = async () => {
      clearTimeout(timer);
      if (!document.hidden) {
        try {
          const data = await call<T>(path, { passive: true });
          if (!over) set({ of: path, data, failure: null });
        } catch (e) {
          const failure = e instanceof Failure ? e : new Failure("refused", String(e));
          if (!over) set((was) => ({ of: path, data: was.of === path ? was.data : null, failure }));
        }
      }
      if (!over) timer = window.setTimeout(go, pace);
    };
    const go = () => {
      if (over) return Promise.resolve();
      return (asking ??= load().finally(() => {
        asking = null;
      }));
    };
    ask.current = async () => {
      // An answer under way may be older than what the caller has just changed.
      while (asking) await asking;
      await go();
    };
    const seen = () => !document.hidden && void go();
    document.addEventListener("visibilitychange", seen);
    void go();
    return () => {
      over = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    };
  }, [path, pace]);
  const again = useCallback(() => ask.current(), []);
  // What was asked for another path is not this one's.
  return { data: state.of === path ? state.data : null, failure: state.of === path ? state.failure : null, again };
}
