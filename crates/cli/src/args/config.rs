//! The grammar of `hearth config`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub enum Config {
    /// Say whether the host's settings are right, and where not
    Check(ConfigCheck),
}

#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Example:\n  hearth config check\n  hearth config check ./hearth.toml\n\n\
    What a running daemon uses changes only when it is started anew."
)]
pub struct ConfigCheck {
    /// The file [default: /etc/hearth/hearth.toml]
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
}
