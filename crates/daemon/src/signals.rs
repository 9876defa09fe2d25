//! Signals that must not end a daemon by accident.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::error::{Error, Result};

/// Signals without a meaning for daemons. Their default is to end the process, without a checkpoint: a timer, or `kill -USR1`
/// meant for another program. SIGHUP (a closed terminal, a reload) is handled by each daemon.
const WITHOUT_MEANING: [i32; 7] = [
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGVTALRM,
    libc::SIGPROF,
    libc::SIGIO,
    libc::SIGPWR,
];

/// Ignores the same signals until another program of this process handles them.
pub(crate) fn ignore() {
    for signal in WITHOUT_MEANING.into_iter().chain([libc::SIGHUP]) {
        // SAFETY: plain numbers; nothing of ours runs when one comes.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Ignores signals without a meaning, and SIGHUP until something handles it. They are handled rather than ignored: children
/// would inherit that.
///
/// # Errors
/// The kernel refuses.
pub fn survive() -> Result<()> {
    let unused = Arc::new(AtomicBool::new(false));
    for signal in WITHOUT_MEANING.into_iter().chain([libc::SIGHUP]) {
        signal_hook::flag::register(signal, unused.clone())
            .map_err(|e| Error::internal(format!("cannot watch signal {signal}: {e}")))?;
    }
    Ok(())
}
