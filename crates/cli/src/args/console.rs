//! The grammar of `hearth console`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

/// Where the console keeps what it is told.
#[derive(Clone, Debug, Args)]
pub struct StateDir {
    /// Where `hearth monitor` keeps its state [default: /var/lib/hearth-monitor for root,
    /// $XDG_STATE_HOME/hearth-monitor for others]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum Console {
    /// Have a console, from now on
    #[command(after_help = "Example:\n  hearth console enable\n  \
        hearth console enable --allow-path /srv/vms --allow-path /dev/vg/big\n  \
        hearth console enable --listen 192.0.2.1:8477 --tls-cert /etc/hearth/cert.pem --tls-key /etc/hearth/key.pem")]
    Enable(ConsoleEnable),
    /// Have none; whoever is logged in is out
    #[command(after_help = "Example:\n  hearth console disable")]
    Disable(StateDir),
    /// Show whether and where there is a console, and for whom
    #[command(after_help = "Example:\n  hearth console show")]
    Show(StateDir),
    /// Print a link that logs in once, within five minutes
    #[command(after_help = "Example:\n  hearth console open\n  hearth console open --role viewer")]
    Open(ConsoleOpen),
    /// Add, change or remove accounts
    #[command(
        subcommand,
        after_help = "Example:\n  hearth console account add anna --role operator\n  hearth console account list"
    )]
    Account(ConsoleAccount),
}

#[derive(Clone, Debug, Args)]
pub struct ConsoleEnable {
    /// Where to listen [default: as before, at first 127.0.0.1:8477]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// Certificate and those above it, as PEM; any address but loopback needs one
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its key, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Directory or device where users may look for origins and put recordings; may be given several times, and takes the place of those before
    #[arg(long, value_name = "PATH")]
    pub allow_path: Vec<PathBuf>,
    /// Server whose NBD exports users may add as disks; may be given several times, and takes the place of those before
    #[arg(long, value_name = "HOST[:PORT]")]
    pub allow_server: Vec<String>,
    #[command(flatten)]
    pub state: StateDir,
}

/// What somebody may do in the console.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ConsoleRole {
    /// See everything, change nothing
    Viewer,
    /// Change what the console can change
    Operator,
}

#[derive(Clone, Debug, Args)]
pub struct ConsoleOpen {
    /// What who comes with the link may do
    #[arg(long, value_enum, default_value = "operator")]
    pub role: ConsoleRole,
    #[command(flatten)]
    pub state: StateDir,
}

#[derive(Debug, Subcommand)]
pub enum ConsoleAccount {
    /// Add an account; its password is asked for, or read from standard input
    #[command(
        after_help = "Example:\n  hearth console account add anna --role operator\n  \
        hearth console account add board --role viewer < /root/password"
    )]
    Add(ConsoleAccountAdd),
    /// Give an account another password; its sessions end
    #[command(after_help = "Example:\n  hearth console account passwd anna")]
    Passwd(ConsoleAccountName),
    /// Remove an account; its sessions end
    #[command(after_help = "Example:\n  hearth console account remove anna")]
    Remove(ConsoleAccountName),
    /// List the accounts
    #[command(after_help = "Example:\n  hearth console account list")]
    List(StateDir),
}

#[derive(Clone, Debug, Args)]
pub struct ConsoleAccountAdd {
    /// The account
    #[arg(value_name = "NAME")]
    pub name: String,
    /// What it may do
    #[arg(long, value_enum)]
    pub role: ConsoleRole,
    #[command(flatten)]
    pub state: StateDir,
}

#[derive(Clone, Debug, Args)]
pub struct ConsoleAccountName {
    /// The account
    #[arg(value_name = "NAME")]
    pub name: String,
    #[command(flatten)]
    pub state: StateDir,
}
