//! A way for tests to make a data thread fail under load, in debug builds only.
//!
//! `HEARTH_FAILPOINT` names a file. While it is not there nothing happens. The first data thread with
//! requests at hand that finds it takes it away and does what it says: `panic`; `driver`, its driver
//! fails; `hang`, it hangs until the file is there again.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

/// How often a hanging thread looks whether it may go on.
const LOOK: Duration = Duration::from_millis(10);

/// Looks for the file and obeys it.
///
/// # Panics
///
/// If the file says so.
pub(crate) fn obey() -> std::io::Result<()> {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let Some(file) = FILE.get_or_init(|| std::env::var_os("HEARTH_FAILPOINT").map(PathBuf::from))
    else {
        return Ok(());
    };
    let Ok(order) = std::fs::read_to_string(file) else {
        return Ok(());
    };
    if std::fs::remove_file(file).is_err() {
        // Another thread was faster.
        return Ok(());
    }
    match order.trim() {
        "panic" => panic!("a test asked for it"),
        "driver" => Err(std::io::Error::other("a test broke it")),
        "hang" => {
            while !file.exists() {
                std::thread::sleep(LOOK);
            }
            let _ = std::fs::remove_file(file);
            Ok(())
        }
        _ => Ok(()),
    }
}
