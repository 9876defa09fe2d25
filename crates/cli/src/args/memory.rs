//! The grammar of `hearth memory`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::serve::LogFormat;

#[derive(Debug, Subcommand)]
pub enum Memory {
    /// Show each guest's memory, how short the host is, and what the controller does
    #[command(after_help = "Example:\n  hearth memory status\n  \
        hearth memory status --guest vm1=/run/vm1.qmp --json\n\n\
        What the columns mean: docs/memory.md.")]
    Status(MemoryHost),
    /// Say how far this host can be over-committed, by what is seen of it now
    #[command(
        after_help = "Example:\n  hearth memory plan\n  hearth memory plan --guest vm1=/run/vm1.qmp"
    )]
    Plan(MemoryHost),
    /// Run the controller until Ctrl-C or SIGTERM; then everything it has changed is set back
    #[command(after_help = "Example:\n  hearth memory run\n  \
        hearth memory run --guest vm1=/run/vm1.qmp\n\n\
        The service is hearth-memory: systemctl enable --now hearth-memory.")]
    Run(MemoryRun),
    /// Set back what a controller has changed that was killed
    #[command(after_help = "Example:\n  hearth memory undo\n\n\
        A controller that is running sets everything back itself when it is stopped.")]
    Undo,
    /// Show what the controller has done, and why
    #[command(
        after_help = "Example:\n  hearth memory events --since 2h\n  hearth memory events --json"
    )]
    Events(MemoryEvents),
}

/// What is looked at.
#[derive(Clone, Debug, Args)]
pub struct MemoryHost {
    /// File with the section [memory] [default: /etc/hearth/hearth.toml if it is there]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A guest and its QMP socket, besides those of the file and of libvirt
    #[arg(long, value_name = "NAME=SOCKET", value_parser = parse_guest)]
    pub guest: Vec<(String, PathBuf)>,
    /// A control group with a limit that holds all guests: its memory is divided, not the host's
    #[arg(long, value_name = "DIR")]
    pub cgroup: Option<PathBuf>,
}

#[derive(Clone, Debug, Args)]
pub struct MemoryRun {
    #[command(flatten)]
    pub host: MemoryHost,
    /// Directory in which events are kept [default: /var/lib/hearth-memory]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Form of the log on standard error
    #[arg(long, value_enum, default_value = "text")]
    pub log_format: LogFormat,
    /// What to log: error, warn, info, debug, trace, or a filter [default: info] [env: HEARTH_LOG]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
}

#[derive(Clone, Debug, Args)]
pub struct MemoryEvents {
    /// Only the last so long: 90s, 10m, 2h, 7d
    #[arg(long, value_name = "DURATION", value_parser = super::trace::parse_duration)]
    pub since: Option<f64>,
    /// So many at most, the newest
    #[arg(long, value_name = "N", default_value = "1000", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
    /// Directory in which events are kept [default: /var/lib/hearth-memory]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
}

fn parse_guest(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, socket)) if !name.is_empty() && !socket.is_empty() => {
            Ok((name.to_owned(), PathBuf::from(socket)))
        }
        _ => Err("give a name and a QMP socket, as vm1=/run/vm1.qmp".to_owned()),
    }
}
