//! Waiting for something the daemon is at: asking how far it is, and showing that, until it is done or Ctrl-C
//! calls it off.

use std::time::Duration;

use crate::Failure;
use crate::args::Global;
use crate::interrupt::Interrupt;
use crate::status::StatusLine;

/// How often progress is asked for and shown.
const POLL: Duration = Duration::from_millis(200);
/// How often progress is printed where it cannot be rewritten in place.
const LOG_EVERY: Duration = Duration::from_secs(10);
/// The first wait is this short, each further one twice as long, up to [`POLL`]: what takes no
/// time should not seem to.
const POLL_FIRST: Duration = Duration::from_millis(10);

/// Lets `look` ask and show, again and again, until it has an outcome. After a Ctrl-C it is `call_off` that says what
/// becomes of it.
///
/// `interrupt` watches since before the order was given: a Ctrl-C in between would end this program
/// and leave the daemon at work.
pub fn follow<T>(
    global: &Global,
    interrupt: &Interrupt,
    call_off: impl FnOnce() -> Failure,
    mut look: impl FnMut(&mut StatusLine) -> Result<Option<T>, Failure>,
) -> Result<T, Failure> {
    let mut line = StatusLine::new(!global.json).lines_every(LOG_EVERY);
    let mut wait = POLL_FIRST;
    loop {
        let called_off = interrupt.sleep(wait);
        wait = (wait * 2).min(POLL);
        if called_off {
            line.end();
            return Err(call_off());
        }
        if let Some(outcome) = look(&mut line)? {
            return Ok(outcome);
        }
    }
}
