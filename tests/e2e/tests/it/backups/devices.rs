//! The same of an origin that is a block device.
//!
//! Exclusive: loop devices

use super::*;
use crate::users::Loop;

#[test]
fn dirty_loop_origin_opened_is_reported_once() -> Result<()> {
    let hearth = serving_slowly()?;
    let file = hearth.origin("o.raw", 16 * MIB)?;
    let Some(device) = Loop::new("backups: an origin", &file, &[]) else {
        return Ok(());
    };
    hearth.add("d", &device.0, &[])?;
    open_is_reported_once(&hearth, Path::new(&device.0))
}
