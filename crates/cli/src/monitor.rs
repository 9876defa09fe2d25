//! `hearth monitor`: the second service, with the parts it is made of.

use std::sync::Arc;

use hearth_monitor::{Options, Part};

use crate::args::{Global, Monitor};
use crate::serve::log_to_stderr;
use crate::{Outcome, console};

pub fn run(global: &Global, args: Monitor) -> Outcome {
    log_to_stderr(args.log.as_deref(), args.log_format)?;
    Ok(hearth_monitor::run(Options {
        run_dir: global.dir(),
        state_dir: args
            .state_dir
            .map(|dir| std::path::absolute(&dir).unwrap_or(dir)),
        control_group: args.control_group,
        parts: parts(),
    })?)
}

/// What the second service does besides watching the daemon. Another part is another line here.
fn parts() -> Vec<Arc<dyn Part>> {
    vec![Arc::new(console::Shown)]
}
