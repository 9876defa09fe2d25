//! The grammar of `hearth monitor`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::serve::LogFormat;

#[derive(Clone, Debug, Subcommand)]
pub enum Alert {
    /// Show what is wrong and was told, and what has not arrived
    #[command(after_help = "Example:\n  hearth alert list")]
    List,
    /// Send a test every way that is configured, and wait for what comes of it
    #[command(after_help = "Example:\n  hearth alert test")]
    Test,
    /// Tell, every way, that a unit of systemd has failed: for OnFailure= of the second service itself
    #[command(after_help = "Example:\n  hearth alert failed hearth-monitor.service")]
    Failed {
        /// The unit
        #[arg(value_name = "UNIT")]
        unit: String,
        /// File with the section [alerts] [default: /etc/hearth/hearth.toml if it is there]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Example:\n  hearth monitor\n  \
    hearth monitor --run-dir ./run --state-dir ./monitor\n\n\
    It watches the daemon of --run-dir from outside, and goes on when that ends. SIGTERM or Ctrl-C stops it.")]
pub struct Monitor {
    /// File with the section [alerts], which says who is told of what is wrong [default:
    /// /etc/hearth/hearth.toml if it is there]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory of what it must remember [default: /var/lib/hearth-monitor for root,
    /// $XDG_STATE_HOME/hearth-monitor for others]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Group that may ask it [default: nobody but root and the user who runs it]
    #[arg(long, value_name = "GROUP")]
    pub control_group: Option<String>,
    /// Form of the log on standard error
    #[arg(long, value_enum, default_value = "text")]
    pub log_format: LogFormat,
    /// What to log: error, warn, info, debug, trace, or a filter [default: info] [env: HEARTH_LOG]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
}
