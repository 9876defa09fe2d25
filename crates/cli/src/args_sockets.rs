//! Options of `hearth serve` that say who may use its sockets.

use clap::Args;

#[derive(Clone, Debug, Args)]
pub struct Sockets {
    /// Group that may use the disks: the NBD and vhost-user sockets [default for root: kvm, where
    /// there is such a group]
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,
    /// Group that may control the daemon: add and remove disks, read statistics [default: nobody
    /// but root and the user who runs it]
    #[arg(long, value_name = "GROUP")]
    pub control_group: Option<String>,
}
