//! Pools on files: made, found again, refused; and a registry whose copies fail.

use super::*;
use crate::pool::change::{Change, change};

fn file(size: u64) -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("flash");
    std::fs::File::create(&path).unwrap().set_len(size).unwrap();
    (dir, path)
}

fn sized(size: u64) -> CreateOptions {
    CreateOptions {
        size: Some(size),
        ..CreateOptions::default()
    }
}

fn add_disk(pool: &mut Pool) -> Result<()> {
    pool.change(|r| {
        let id = r.take_disk_id().unwrap();
        let disk = DiskRecord {
            id,
            name: "d".into(),
            origin: "/o".into(),
            size: 1,
            ..DiskRecord::default()
        };
        r.disks.push(disk.into());
        Ok(())
    })
}

#[test]
fn created_and_found_again() {
    let (_dir, path) = file(64 << 20);
    let options = CreateOptions {
        label: "lab".to_owned(),
        ..CreateOptions::default()
    };
    let info = create(&path, &options).unwrap();
    assert_eq!((info.label.as_str(), info.state.as_str()), ("lab", "new"));
    // The RAM stage is at least 1 MiB, which only so small a pool notices.
    assert!(info.log_bytes > 48 << 20 && info.ram < info.log_bytes / 16);
    let mut pool = Pool::open(&path).unwrap();
    assert_eq!(pool.info().uuid, info.uuid);
    add_disk(&mut pool).unwrap();
    drop(pool);
    assert_eq!(
        Pool::look(&path).unwrap().info_with_origins().disks[0].name,
        "d"
    );
}

#[test]
fn a_failed_change_changes_nothing() {
    let (_dir, path) = file(64 << 20);
    create(&path, &CreateOptions::default()).unwrap();
    let mut pool = Pool::open(&path).unwrap();
    let refused: Result<()> = pool.change(|r| {
        r.take_disk_id();
        Err(Error::no_disk("x"))
    });
    assert!(refused.is_err());
    assert_eq!(pool.registry().next_disk_id, 1);
}

#[test]
fn what_is_there_is_not_overwritten() {
    let (_dir, path) = file(64 << 20);
    create(&path, &CreateOptions::default()).unwrap();
    let again = create(&path, &CreateOptions::default()).unwrap_err();
    assert!(again.what.contains("a Hearth pool"), "{again}");
    let new_file = create(&path, &sized(64 << 20)).unwrap_err();
    assert!(new_file.what.contains("exists"), "{new_file}");
    let open = Pool::open(&path).unwrap();
    let force = CreateOptions {
        force: true,
        ..CreateOptions::default()
    };
    assert_eq!(create(&path, &force).unwrap_err().kind, Kind::Conflict);
    drop(open);
    create(&path, &force).unwrap();
    create(
        &path,
        &CreateOptions {
            force: true,
            ..sized(80 << 20)
        },
    )
    .unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 80 << 20);
}

#[test]
fn create_on_used_file_needs_force() {
    use std::os::unix::fs::FileExt;
    for at in [0, 5 << 20, (33 << 20) + 1, (64 << 20) - 1] {
        let (_dir, path) = file(64 << 20);
        let used = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        used.write_all_at(&[1], at).unwrap();
        drop(used);
        let refused = create(&path, &CreateOptions::default()).unwrap_err();
        assert!(
            refused.what.contains(&format!("byte {at} is not zero")),
            "{refused}"
        );
        assert!(refused.remedy.contains("--force"), "{refused}");
        let mut byte = [0];
        let file = std::fs::File::open(&path).unwrap();
        file.read_exact_at(&mut byte, at).unwrap();
        assert_eq!(byte, [1], "it was overwritten");
        drop(file);
        let force = CreateOptions {
            force: true,
            ..CreateOptions::default()
        };
        create(&path, &force).unwrap();
    }
    // Zeros that take space are no data.
    let (_dir, path) = file(64 << 20);
    std::fs::write(&path, vec![0; 64 << 20]).unwrap();
    create(&path, &CreateOptions::default()).unwrap();
}

#[test]
fn what_is_replaced_is_there_until_the_new_pool_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("flash");
    let uuid = create(&path, &sized(64 << 20)).unwrap().uuid;
    let forced = |size| CreateOptions {
        force: true,
        ..sized(size)
    };
    assert!(create(&path, &forced(1 << 20)).is_err());
    assert!(create(&path, &forced(1 << 60)).is_err());
    let stopped = create_with(&path, &forced(96 << 20), &mut |at, _| at == 0);
    assert!(stopped.unwrap_err().what.contains("interrupted"));
    assert_eq!(Pool::look(&path).unwrap().info().uuid, uuid);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    let new = dir.path().join("flash.new");
    std::fs::write(&new, "somebody's").unwrap();
    let taken = create(&path, &forced(96 << 20)).unwrap_err();
    assert!(taken.what.contains("flash.new"), "{taken}");
    assert_eq!(std::fs::read(&new).unwrap(), b"somebody's");
    std::fs::remove_file(new).unwrap();
    let made = create(&path, &forced(96 << 20)).unwrap();
    assert_ne!(made.uuid, uuid);
    assert_eq!(made.flash, [path.display().to_string()]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_new_file_is_written_out_unless_told_otherwise() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("flash");
    let mut calls = 0;
    create_with(&path, &sized(64 << 20), &mut |done, total| {
        assert!(done <= total && total == 64 << 20);
        calls += 1;
        true
    })
    .unwrap();
    assert_eq!(calls, 17);
    let stopped = dir.path().join("stopped");
    let error = create_with(&stopped, &sized(64 << 20), &mut |done, _| done < 8 << 20);
    assert!(error.unwrap_err().what.contains("interrupted"));
    assert!(!stopped.exists());
    let quick = CreateOptions {
        quick: true,
        ..sized(64 << 20)
    };
    let reserved = dir.path().join("reserved");
    create_with(&reserved, &quick, &mut |_, _| false).unwrap();
    assert_eq!(std::fs::metadata(&reserved).unwrap().size(), 64 << 20);
}

#[test]
fn too_small_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("flash");
    assert!(create(&path, &sized(1 << 20)).is_err());
    assert!(!path.exists());
    let missing = create(&path, &CreateOptions::default()).unwrap_err();
    assert!(missing.remedy.contains("--size"), "{missing}");
}

#[test]
fn truncated_and_foreign_files_are_refused_with_their_names() {
    let (_dir, path) = file(64 << 20);
    let none = Pool::open(&path).map(drop).unwrap_err();
    assert!(
        none.what.contains("flash") && none.what.contains("no Hearth pool"),
        "{none}"
    );
    create(&path, &CreateOptions::default()).unwrap();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(32 << 20)
        .unwrap();
    let short = Pool::open(&path).map(drop).unwrap_err();
    assert!(
        short.what.contains("truncated") && !short.remedy.is_empty(),
        "{short}"
    );
}

#[test]
fn a_stage_nobody_asked_for_takes_what_the_limits_leave() {
    let (_dir, path) = file(512 << 20);
    create(&path, &CreateOptions::default()).unwrap();
    let pool = Pool::open(&path).unwrap();
    let most = stage_within(&pool, None, None);
    assert!((5 << 20..=512 << 20).contains(&most), "1 %: {most}");
    // What is free counts, but it has what it needs.
    assert_eq!(stage_within(&pool, None, Some(16 << 20)), 4 << 20);
    assert_eq!(stage_within(&pool, None, Some(0)), 1 << 20);
    let limit = pool.footprint(Some(3 << 20));
    let within = stage_within(&pool, Some(limit), None);
    assert!(((2 << 20)..=(3 << 20)).contains(&within), "{within}");
    assert!(check_memory(&pool, Some(limit), Some(within)).is_ok());
    let tight = pool.footprint(Some(1 << 20)) - 1;
    let least = stage_within(&pool, Some(tight), None);
    assert_eq!(least, 1 << 20);
    assert!(check_memory(&pool, Some(tight), Some(least)).is_err());
}

#[test]
fn a_stage_larger_than_the_memory_is_refused() {
    let error = check_stage(Some(2 << 30), Some(1 << 30)).unwrap_err();
    assert!(error.what.contains("--ram-stage 2 GiB"), "{error}");
    assert!(check_stage(Some(1 << 30), Some(2 << 30)).is_ok());
    assert!(check_stage(Some(1 << 30), None).is_ok());
    assert!(check_stage(None, Some(1)).is_ok());
}

/// A pool on three new files of unequal size.
fn three() -> (tempfile::TempDir, Vec<PathBuf>) {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = ["a", "b", "c"].map(|n| dir.path().join(n)).into();
    let devices = paths.iter().zip([64 << 20, 32 << 20, 48 << 20]);
    let devices = devices.map(|(path, size)| DeviceAt {
        path: path.clone(),
        size: Some(size),
    });
    let devices: Vec<DeviceAt> = devices.collect();
    let info = create_several(&devices, &CreateOptions::default(), &mut |_, _| true).unwrap();
    assert_eq!(info.device_bytes, 144 << 20);
    assert_eq!(info.devices.len(), 3);
    assert!(info.log_bytes > 110 << 20, "{info:?}");
    (dir, paths)
}

#[test]
fn several_devices_are_one_pool_in_any_order() {
    let (_dir, paths) = three();
    let mut pool = Pool::open_all(&paths).unwrap();
    add_disk(&mut pool).unwrap();
    pool.stamp().unwrap();
    drop(pool);
    for order in [[2, 0, 1], [1, 2, 0], [2, 1, 0]] {
        let given = order.map(|n| paths[n].clone());
        let mut pool = Pool::open_all(&given).unwrap();
        assert_eq!(pool.paths(), paths);
        assert_eq!(pool.registry().disks.len(), 1);
        pool.stamp().unwrap();
    }
    let shown = show(&paths, Path::new("/nonexistent")).unwrap();
    assert!(shown.devices.iter().all(|d| d.cached == Some(0)));
}

#[test]
fn what_is_not_all_of_a_pool_is_refused_with_what_it_lacks() {
    let (dir, paths) = three();
    let [a, b, c] = [0, 1, 2].map(|n| paths[n].clone());
    let refused = |given: &[&PathBuf]| {
        let given: Vec<PathBuf> = given.iter().map(|p| (*p).clone()).collect();
        Pool::open_all(&given).map(drop).unwrap_err().what
    };
    assert!(refused(&[]).contains("no flash device"));
    let uuids: Vec<String> = show(&paths, Path::new("/nonexistent"))
        .unwrap()
        .devices
        .into_iter()
        .map(|d| d.uuid)
        .collect();
    for (given, n, lacks) in [
        (vec![&a, &c], 1, "device 2 (32 MiB"),
        (vec![&a], 1, "device 2 (32 MiB"),
        (vec![&c, &b], 0, "device 1 (64 MiB"),
    ] {
        let what = refused(&given);
        assert!(what.contains("has 3 flash devices"), "{what}");
        assert!(what.contains(lacks) && what.contains(&uuids[n]), "{what}");
    }
    assert_eq!(
        refused(&[&a, &b, &b, &c]),
        format!("{} is given twice", b.display())
    );
    let link = dir.path().join("link");
    std::fs::hard_link(&b, &link).unwrap();
    assert!(refused(&[&a, &b, &link]).contains("are the same device"));
    std::fs::remove_file(&link).unwrap();
    // Copies: beside what they are of, and of an earlier time in its place.
    let copy = dir.path().join("copy");
    std::fs::copy(&b, &copy).unwrap();
    assert!(refused(&[&a, &b, &copy, &c]).contains("one is a copy of the other"));
    let copy_of_a = dir.path().join("copy-of-a");
    std::fs::copy(&a, &copy_of_a).unwrap();
    Pool::open_all(&paths).unwrap().stamp().unwrap();
    let old = refused(&[&a, &copy, &c]);
    assert!(
        old.contains(&format!("{} is older than {}", copy.display(), a.display())),
        "{old}"
    );
    let old = refused(&[&copy_of_a, &b, &c]);
    assert!(
        old.contains(&format!("{} is older than", copy_of_a.display())),
        "{old}"
    );
    // A device of another pool.
    let other = dir.path().join("other");
    create(&other, &sized(64 << 20)).unwrap();
    assert!(refused(&[&a, &other, &c]).contains("of pool"));
    // Nothing of that has changed anything.
    assert!(Pool::open_all(&paths).is_ok());
}

#[test]
fn devices_that_do_not_fit_together_are_refused_before_anything_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str, size: u64| DeviceAt {
        path: dir.path().join(name),
        size: Some(size),
    };
    let refused = |devices: &[DeviceAt]| {
        let made = create_several(devices, &CreateOptions::default(), &mut |_, _| true);
        made.map(drop).unwrap_err()
    };
    let small = refused(&[at("a", 64 << 20), at("b", 4 << 20)]);
    assert!(
        small.what.contains("/b:") && small.what.contains("12 MiB"),
        "{small}"
    );
    let lead = refused(&[at("a", 16 << 20), at("b", 64 << 30)]);
    assert!(lead.remedy.contains("name a larger device first"), "{lead}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// So many disks that the registry has a journal.
fn add_many(pool: &mut Pool) {
    pool.change(|r| {
        for n in 1..=600 {
            let id = r.take_disk_id().unwrap();
            let disk = DiskRecord {
                id,
                name: format!("vm-{n}"),
                origin: format!("/srv/images/vm-{n}"),
                size: 1 << 30,
                ..DiskRecord::default()
            };
            r.disks.push(disk.into());
        }
        Ok(())
    })
    .unwrap();
}

/// A registry's two areas.
fn areas() -> [std::ops::Range<u64>; 2] {
    use hearth_format::layout::{REGISTRY_AREA_BLOCKS, REGISTRY_BLOCKS};
    REGISTRY_BLOCKS.map(|start| start * BLOCK..(start + REGISTRY_AREA_BLOCKS) * BLOCK)
}

fn flip(path: &Path, at: u64) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().read(true).write(true).open(path);
    let file = file.unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

/// Of the registry's two copies one may have been written: until it is overwritten, a crash would
/// bring the change about. That holds for a whole copy and for an entry of its journal.
#[test]
fn a_change_that_failed_halfway_is_undone_by_the_next_store() {
    use hearth_io::{FaultKind, FaultRule};
    for large in [false, true] {
        for area in areas() {
            let (_dir, path) = file(64 << 20);
            create(&path, &CreateOptions::default()).unwrap();
            let mut pool = Pool::open(&path).unwrap();
            if large {
                add_many(&mut pool);
            }
            let before = pool.registry().disks.clone();
            pool.media.faults().arm(FaultRule {
                offset: area.start,
                len: area.end - area.start,
                ..FaultRule::eio(FaultKind::Write)
            });
            let failed = add_disk(&mut pool);
            assert_eq!(failed.unwrap_err().kind, Kind::Unavailable);
            assert!(pool.refusal().is_some());
            pool.media.faults().clear();
            pool.change(|_| Ok(())).unwrap();
            drop(pool);
            assert!(Pool::open(&path).unwrap().registry().disks == before);
        }
    }
}

#[test]
fn a_copy_that_rots_brings_back_nothing_old_and_is_stored_again_by_the_next_start() {
    for large in [false, true] {
        for rotten in 0..2 {
            let (_dir, path) = file(64 << 20);
            create(&path, &CreateOptions::default()).unwrap();
            let mut pool = Pool::open(&path).unwrap();
            if large {
                add_many(&mut pool);
            }
            add_disk(&mut pool).unwrap();
            let disks = pool.registry().disks.clone();
            drop(pool);
            // The checksum, of a base or of the only one.
            let [a, b] = areas();
            flip(&path, [&a, &b][rotten].start + 5);
            let mut pool = Pool::open(&path).unwrap();
            assert!(pool.registry().disks == disks);
            let started = crate::degraded::start(&mut pool, &Default::default(), "host", None);
            assert!(started.unwrap().degraded.is_none());
            drop(pool);
            flip(&path, [&b, &a][rotten].start + 5);
            assert!(Pool::open(&path).unwrap().registry().disks == disks);
        }
    }
}

/// The registry of a full pool; what does not fit is refused and nothing else happens.
#[test]
fn a_pool_takes_as_many_disks_as_there_are_numbers_if_it_is_large_enough() {
    let many = |pool: &mut Pool| {
        pool.change(|r| {
            let taken = r.disks.iter().map(|d| d.id).max().unwrap_or_default();
            let disk = |id| DiskRecord {
                id,
                name: format!("vm-{id}"),
                origin: format!("/srv/images/vm-{id}"),
                size: 1 << 30,
                ..DiskRecord::default()
            };
            let all = taken + 1..=hearth_format::disk::DISK_ID_MAX;
            r.disks.extend(all.map(|id| disk(id).into()));
            r.next_disk_id = 1;
            Ok(())
        })
    };
    let (_dir, path) = file(16 << 30);
    create(&path, &CreateOptions::default()).unwrap();
    let mut pool = Pool::open(&path).unwrap();
    add_disk(&mut pool).unwrap();
    many(&mut pool).unwrap();
    pool.change(|r| {
        r.disks.retain(|d| d.name != "d");
        Ok(())
    })
    .unwrap();
    drop(pool);
    let pool = Pool::look(&path).unwrap();
    assert_eq!(pool.registry().disks.len(), 32_766);
    assert_eq!(pool.registry().free_disk_id(|_| false), Some(1));

    let (_dir, path) = file(64 << 20);
    create(&path, &CreateOptions::default()).unwrap();
    let mut pool = Pool::open(&path).unwrap();
    let error = many(&mut pool).unwrap_err();
    assert!(error.remedy.contains("larger device"), "{error}");
    add_disk(&mut pool).unwrap();
}

/// What was changed in RAM alone is in no entry of the journal.
#[test]
fn what_was_kept_in_ram_goes_to_flash_with_the_next_change() {
    let (_dir, path) = file(64 << 20);
    create(&path, &CreateOptions::default()).unwrap();
    let mut pool = Pool::open(&path).unwrap();
    add_many(&mut pool);
    pool.change(|r| {
        for disk in &mut r.disks {
            disk.clean_detach = true;
            disk.origin_identity = Some(Default::default());
        }
        Ok(())
    })
    .unwrap();
    pool.mark_failed().unwrap();
    pool.distrust_in_ram_if_failed();
    add_disk(&mut pool).unwrap();
    assert!(Pool::look(&path).unwrap().registry() == pool.registry());
    pool.set_covered();
    let breaks_a_rule = |r: &mut Registry| {
        r.disks[7].size = 77;
        match r.disks.iter_mut().find(|disk| disk.name == "d") {
            Some(disk) => disk.max_bytes = 1,
            None => return Err(Error::no_disk("d")),
        }
        r.disks[8].min_bytes = 2;
        r.disks[8].max_bytes = 1;
        Ok(())
    };
    pool.change_or_keep(breaks_a_rule).unwrap();
    pool.change(|r| {
        r.disks[8].max_bytes = 0;
        Ok(())
    })
    .unwrap();
    assert_eq!(pool.registry().disks[7].size, 77);
    assert!(Pool::look(&path).unwrap().registry() == pool.registry());
}

/// It then shares the checkpoint's area.
#[test]
fn a_registry_that_has_grown_and_a_checkpoint_leave_each_other_alone() {
    let (_dir, path) = file(4 << 30);
    create(&path, &CreateOptions::default()).unwrap();
    let mut pool = Pool::open(&path).unwrap();
    add_many(&mut pool);
    pool.change(|r| {
        for disk in &mut r.disks {
            disk.unknown = vec![(500, vec![disk.id as u8; 1200])];
        }
        Ok(())
    })
    .unwrap();
    drop(pool);
    let options = hearth_engine::EngineOptions::default();
    for round in 0..2 {
        let mut pool = Pool::open(&path).unwrap();
        let disks = pool.registry().disks.len();
        assert_eq!(disks, 600 - round);
        let started = crate::degraded::start(&mut pool, &options, "host", None).unwrap();
        let from = match round {
            0 => hearth_engine::OpenedFrom::Log,
            _ => hearth_engine::OpenedFrom::Checkpoint,
        };
        assert_eq!(started.report.from, from);
        pool.change(|r| {
            r.disks.pop();
            Ok(())
        })
        .unwrap();
        started.engine.close(&mut pool.media.clone()).unwrap();
    }
}

/// A pool on two files that keeps everything twice, and what is to be kept beside it.
fn twice() -> (tempfile::TempDir, Vec<std::path::PathBuf>) {
    twice_made(true)
}

/// The same, in which clean blocks are there `once`, or, as earlier versions made it, twice.
fn twice_made(once: bool) -> (tempfile::TempDir, Vec<std::path::PathBuf>) {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["a", "b"].map(|name| dir.path().join(name)).to_vec();
    let devices: Vec<DeviceAt> = paths
        .iter()
        .map(|path| DeviceAt {
            path: path.clone(),
            size: Some(64 << 20),
        })
        .collect();
    let options = CreateOptions {
        twice: true,
        ..CreateOptions::default()
    };
    create::create_laid_out(&devices, &options, once, &mut |_, _| true).unwrap();
    (dir, paths)
}

#[test]
fn of_what_is_there_twice_it_is_told_how_often_clean_blocks_are_there_and_what_fits() {
    for (once, copies) in [(true, 1), (false, 2)] {
        let (_dir, paths) = twice_made(once);
        let pool = Pool::look_at(&paths).unwrap();
        let info = pool.info();
        assert_eq!((info.dirty_copies, info.clean_copies), (2, copies));
        let segments = u64::from(pool.superblock.layout.segment_count);
        assert_eq!(info.segments, segments);
        let each = u64::from(pool.superblock.layout.data_blocks()) * BLOCK;
        assert_eq!(info.log_bytes, segments * each * 2 / u64::from(copies));
        assert_eq!(pool.kept_capacity(), segments * each);
        // What all of both devices would hold, or one.
        let most = (64 << 20) * 2 / u64::from(copies);
        assert!(info.log_bytes < most && info.log_bytes > most / 4 * 3);
        drop(pool);
        // Opening it changes nothing about that.
        drop(Pool::open_all(&paths).unwrap());
        let again = Pool::look_at(&paths).unwrap().info();
        assert_eq!(again.clean_copies, copies);
    }
}

#[test]
fn a_pool_of_which_half_is_there_is_not_served_without_flash() {
    let (dir, paths) = twice();
    let state = dir.path().join("state");
    let mut pool = Pool::look_at(&paths).unwrap();
    pool.remember(&state).unwrap();
    pool.note_opened(Default::default(), true, 1).unwrap();
    drop(pool);
    let without = || Pool::without_flash(&state, &paths).unwrap();
    assert!(without().is_none());
    std::fs::remove_file(&paths[0]).unwrap();
    assert!(without().is_none(), "the other one has everything");
    std::fs::remove_file(&paths[1]).unwrap();
    assert!(without().is_some());
}

#[test]
fn an_older_device_that_is_back_alone_is_never_believed() {
    let (dir, paths) = twice();
    let state = dir.path().join("state");
    let mut pool = Pool::open_all(&paths).unwrap();
    add_disk(&mut pool).unwrap();
    pool.remember(&state).unwrap();
    let found = pool.superblock.generation;
    pool.note_opened(Default::default(), true, found + 1)
        .unwrap();
    // The other one notes that this one is lost.
    let lost_at = found + 2;
    let beside = pool.beside().unwrap();
    beside.note(|notes| notes.opened = lost_at).unwrap();
    drop(pool);
    std::fs::remove_file(&paths[1]).unwrap();
    for _ in 0..2 {
        let mut pool = Pool::open_all(&paths[..1]).unwrap();
        pool.remember(&state).unwrap();
        let record = pool.record(1).unwrap();
        assert!(crate::origin::is_distrusted(record));
        // The start is cut off when its generation has been raised.
        pool.stamp().unwrap();
        assert!(pool.superblock.generation >= lost_at);
    }
}

#[test]
fn a_stranger_in_the_place_of_a_lost_device_is_passed_over() {
    let (_dir, ours) = twice();
    let (_other, theirs) = twice();
    std::fs::copy(&theirs[0], &ours[1]).unwrap();
    // A mistake in the list must not cost a device that is there.
    let mistaken = Pool::open_all(&ours).err().unwrap();
    assert!(mistaken.what.contains("pool"), "{mistaken}");
    let mut pool = Pool::open_all(&ours[..1]).unwrap();
    pool.stamp().unwrap();
    drop(pool);
    let pool = Pool::open_all(&ours).unwrap();
    assert!(pool.flash().is_lost(1) && !pool.flash().is_lost(0));
    assert!(!pool.flash().misses_one());
    drop(pool);
    // Where both have gone on alone, nobody knows which pool is meant.
    let mut pool = Pool::open_all(&theirs[..1]).unwrap();
    pool.stamp().unwrap();
    drop(pool);
    std::fs::copy(&theirs[0], &ours[1]).unwrap();
    assert!(Pool::open_all(&ours).is_err());
}

#[test]
fn what_took_the_place_of_a_device_that_was_served_since_is_refused() {
    let (dir, paths) = twice();
    let state = dir.path().join("state");
    let mut pool = Pool::open_all(&paths).unwrap();
    pool.remember(&state).unwrap();
    let opened = pool.superblock.generation + 1;
    pool.note_opened(Default::default(), true, opened).unwrap();
    let before = pool.superblock.device;
    drop(pool);
    let new = dir.path().join("new");
    let what = Change::Replace {
        old: paths[0].clone(),
        new: DeviceAt {
            path: new.clone(),
            size: Some(64 << 20),
        },
    };
    let options = CreateOptions::default();
    change(&paths, &what, &options, &state, &mut |_, _| true).unwrap();
    let today = [new, paths[1].clone()];
    let mut pool = Pool::open_all(&today).unwrap();
    pool.remember(&state).unwrap();
    // As if it had been cut off, and the old one served: it is what is noted, and newer.
    let newer = pool.superblock.generation + 7;
    let beside = pool.beside().unwrap();
    let noted = beside.note(|notes| (notes.device, notes.opened) = (before, newer));
    noted.unwrap();
    drop(pool);
    let mut pool = Pool::open_all(&today).unwrap();
    let refused = pool.remember(&state).unwrap_err();
    assert!(refused.what.contains("older"), "{refused}");
    let beside = crate::beside::Beside::of(&state, &pool.superblock.pool);
    assert_eq!(beside.unwrap().unwrap().notes().device, before);
}

/// What was swapped out to a part of the pool may look like anything. None of it is left where the log will be.
#[test]
fn flash_that_had_an_area_is_adopted_without_what_was_swapped_out_there() {
    let dir = tempfile::tempdir().unwrap();
    let (path, state) = (dir.path().join("flash"), dir.path().join("state"));
    let options = CreateOptions {
        size: Some(64 << 20),
        ..CreateOptions::default()
    };
    create(&path, &options).unwrap();
    let mut pool = Pool::open_all(std::slice::from_ref(&path)).unwrap();
    pool.remember(&state).unwrap();
    pool.note_opened(Default::default(), true, 1).unwrap();
    let area = hearth_format::Area {
        first: pool.superblock.layout.segment_count - 3,
        segments: 3,
    };
    pool.superblock.add_area(area).unwrap();
    let place = pool.superblock.place_of(area).unwrap();
    let mut media = pool.flash().iter().next().unwrap().clone();
    pool.superblock.store(&mut media).unwrap();
    drop((pool, media));
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    use std::os::unix::fs::FileExt;
    file.write_all_at(&vec![0xaa; place.bytes as usize], place.offset)
        .unwrap();
    drop(file);
    let again = CreateOptions {
        force: true,
        ..CreateOptions::default()
    };
    // Called off, it begins anew: the list is there still.
    adopt_flash(&path, &again, &state, None, &mut |_, _| false).unwrap_err();
    adopt_flash(&path, &again, &state, None, &mut |_, _| true).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let area = &bytes[place.offset as usize..][..place.bytes as usize];
    assert!(area.iter().all(|byte| *byte == 0));
    let pool = Pool::open_all(std::slice::from_ref(&path)).unwrap();
    assert!(pool.superblock.areas.is_empty());
}
