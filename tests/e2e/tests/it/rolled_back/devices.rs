//! Block devices as origins that changed, are newer than the flash, or are other ones under the same name.
//!
//! Exclusive: loop devices

use super::*;
use crate::users::Loop;
use hearth_rig::clients::run_ok;
use std::os::unix::fs::MetadataExt;

/// Writes to a device as its own driver does.
fn write_device(device: &Loop, offset: u64, data: &[u8]) -> Result<()> {
    let device = OpenOptions::new().write(true).open(&device.0)?;
    device.write_all_at(data, offset)?;
    Ok(device.sync_all()?)
}

/// Five blocks are rolled back while the daemon is stopped in order, after ordinary work of a guest.
#[test]
fn rolled_back_loop_origin_is_noticed() -> Result<()> {
    let mut hearth = Hearth::serving("256M")?;
    let file = hearth.origin("o.raw", SIZE)?;
    let Some(device) = Loop::new("rolled_back: an origin", &file, &[]) else {
        return Ok(());
    };
    hearth.add("d", &device.0, &["--seq-cutoff", "0"])?;
    warm_up(&hearth)?;
    let before = hot_of(&file)?;
    let places = [2, 5, 8, 11, 14].map(|n| n * MIB + 64 * 4096);
    let mut client = hearth.connect("d")?;
    for at in places {
        client.write(at, &[0xEE; 4096])?;
    }
    client.flush()?;
    drop(client);
    hearth.ok(&["disk", "flush", "d"])?;
    warm_up(&hearth)?;
    hearth.stop()?;
    for at in places {
        let old = (at - HOT.start) as usize;
        write_device(&device, at, &before[old..old + 4096])?;
    }
    hearth.start()?;
    ensure!(read_hot(&hearth)? == before, "a stale block was served");
    let info = until_checked(&hearth)?;
    let notices = info["notices"].to_string();
    ensure!(notices.contains("origin changed"), "{info}");
    ensure!(read_hot(&hearth)? == before, "a stale block was served");
    Ok(())
}

#[test]
fn older_flash_without_state_over_loop_device() -> Result<()> {
    let hearth = Hearth::serving("256M")?;
    let file = hearth.origin("o.raw", SIZE)?;
    let Some(device) = Loop::new("rolled_back: older flash", &file, &[]) else {
        return Ok(());
    };
    hearth.add("d", &device.0, &["--seq-cutoff", "0"])?;
    older_flash_without_state(hearth, &file)
}

/// A file system in a file, mounted.
struct FileSystem {
    at: PathBuf,
}

impl FileSystem {
    /// With the file `o` on it. Nothing where this user may not mount.
    fn new(hearth: &Hearth, name: &str, content: &Path) -> Result<Option<FileSystem>> {
        let image = hearth.dir().join(format!("{name}.img"));
        std::fs::File::create(&image)?.set_len(2 * SIZE)?;
        let at = hearth.dir().join(name);
        std::fs::create_dir(&at)?;
        let made = run_ok("mkfs.ext4", &["-q", "-F", path(&image)], hearth.dir());
        let how = ["-o", "loop", path(&image), path(&at)];
        let mounted = made.and_then(|_| run_ok("mount", &how, hearth.dir()));
        if let Err(e) = mounted {
            eprintln!("skipped: rolled_back: two file systems: {e:#}");
            return Ok(None);
        }
        let made = FileSystem { at };
        std::fs::copy(content, made.file())?;
        Ok(Some(made))
    }

    fn file(&self) -> PathBuf {
        self.at.join("o")
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        let how = ["umount", "-l", path(&self.at)];
        let unmount = std::process::Command::new(how[0]).args(&how[1..]).status();
        if !unmount.is_ok_and(|status| status.success()) {
            eprintln!("{} is still mounted", self.at.display());
        }
    }
}

/// After a reboot a loop device has its number and lies over a clone with the same inode number, on another file system.
#[test]
fn clone_on_other_file_system_is_not_written() -> Result<()> {
    let mut hearth = Hearth::serving("256M")?;
    let template = hearth.origin("template", SIZE)?;
    let one = FileSystem::new(&hearth, "one", &template)?;
    let other = FileSystem::new(&hearth, "other", &template)?;
    let (Some(one), Some(other)) = (one, other) else {
        return Ok(());
    };
    let inode = |fs: &FileSystem| -> Result<u64> { Ok(std::fs::metadata(fs.file())?.ino()) };
    ensure!(inode(&one)? == inode(&other)?, "the case needs one number");
    let Some(device) = Loop::new("rolled_back: a clone", &one.file(), &[]) else {
        return Ok(());
    };
    hearth.add("d", &device.0, &[])?;
    let mut client = hearth.connect("d")?;
    client.write(10 * MIB, &[0xEE; 65536])?;
    client.flush()?;
    drop(client);
    hearth.kill9()?;
    let dir = hearth.dir().to_owned();
    let attach = |file: &Path| {
        run_ok("losetup", &["--detach", &device.0], &dir)?;
        run_ok("losetup", &[&device.0, path(file)], &dir)
    };
    attach(&other.file())?;
    hearth.start()?;
    let info = until_refused(&hearth)?;
    let reason = info["reason"].to_string();
    ensure!(reason.contains("it is another device"), "{info}");
    hearth.kill9()?;
    let clone = std::fs::read(other.file())?;
    ensure!(clone == std::fs::read(&template)?, "the clone was written");
    // The right one is taken again.
    attach(&one.file())?;
    hearth.start()?;
    until_checked(&hearth)?;
    hearth.ok(&["disk", "flush", "d"])?;
    hearth.stop()?;
    drop(device);
    let held = std::fs::read(one.file())?;
    ensure!(held[(10 * MIB) as usize..][..65536] == [0xEE; 65536]);
    Ok(())
}
