//! One line that says how far something is: rewritten in place on a terminal, elsewhere printed now
//! and then, or not at all.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::table::plain;

/// How often a terminal's line is rewritten at most: faster, nobody can read.
const REWRITE: Duration = Duration::from_millis(100);

/// A status line on standard error.
pub struct StatusLine {
    enabled: bool,
    terminal: bool,
    /// Where it cannot be rewritten: how often it is printed.
    every: Option<Duration>,
    /// When it may be written next.
    next: Instant,
    shown: bool,
}

impl StatusLine {
    /// A line, or, not `enabled`, none.
    pub fn new(enabled: bool) -> StatusLine {
        StatusLine {
            enabled,
            terminal: std::io::stderr().is_terminal(),
            every: None,
            next: Instant::now(),
            shown: false,
        }
    }

    /// Says nothing for so long: most things are done by then.
    pub fn quiet_for(mut self, time: Duration) -> StatusLine {
        self.next += time;
        self
    }

    /// Where it cannot be rewritten, prints a line so often.
    pub fn lines_every(mut self, time: Duration) -> StatusLine {
        self.every = Some(time);
        self
    }

    /// Shows `text` if it is time to.
    pub fn show(&mut self, text: impl FnOnce() -> String) {
        let now = Instant::now();
        if !self.enabled || now < self.next {
            return;
        }
        // Nobody can be told that standard error is gone.
        let mut err = std::io::stderr().lock();
        if self.terminal {
            self.next = now + REWRITE;
            self.shown = true;
            let _ = write!(err, "\r\x1b[K{}", plain(&text()));
            let _ = err.flush();
        } else if let Some(every) = self.every {
            self.next = now + every;
            let _ = writeln!(err, "{}", plain(&text()));
        }
    }

    /// Leaves what was shown last, and goes to the next line; so does dropping it.
    pub fn end(&mut self) {
        if std::mem::take(&mut self.shown) {
            eprintln!();
        }
    }
}

impl Drop for StatusLine {
    fn drop(&mut self) {
        self.end();
    }
}
