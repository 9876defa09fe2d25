//! Locks over the protocol: who gets them, who does not, and what a hostile client can do.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::common::{Client, nlm, user};
use crate::stage::{ALL, Stage, file, on_stage};
use anyhow::{Context, Result, ensure};
use hearth_nfs::access::{Access, Rights};
use hearth_nfs::local::By;
use hearth_nfs::nlm::table::USER_RANGES_MAX;
use hearth_nfs::nlm::{Args, LAST, Lock, Status};

/// The answer that a client gets "at once".
const AT_ONCE: Duration = Duration::from_secs(5);

twice!(
    lock_without_registration_is_refused_at_once,
    range_of_one_owner_is_denied_to_others,
    waiting_client_is_blocked_and_asks_again,
    lock_of_another_is_not_unlocked,
    ranges_of_a_client_are_bounded,
    absurd_ranges_and_names_are_refused,
    handles_are_those_of_the_export,
    read_only_client_locks_shared_only,
    mode_of_a_file_limits_its_locks,
    client_without_access_loses_its_locks,
    killed_server_grants_only_reclaims,
);

fn range<'a>(file: &'a [u8], caller: &'a str, offset: u64, len: u64) -> Lock<'a> {
    Lock {
        caller: caller.as_bytes(),
        file,
        owner: b"7@host",
        process: 7,
        offset,
        len,
    }
}

fn asked(lock: Lock<'_>, exclusive: bool) -> Args<'_> {
    Args::Lock {
        block: false,
        exclusive,
        lock,
        reclaim: false,
        state: 1,
        monitored: true,
    }
}

fn reclaimed(lock: Lock<'_>) -> Args<'_> {
    Args::Lock {
        block: false,
        exclusive: true,
        lock,
        reclaim: true,
        state: 1,
        monitored: true,
    }
}

fn expect(client: &mut Client, args: &Args<'_>, status: Status) -> Result<()> {
    let since = Instant::now();
    let answered = nlm(client, args)?;
    ensure!(
        answered == status as u32,
        "{answered} and not {status:?}: {args:?}"
    );
    ensure!(
        since.elapsed() < AT_ONCE,
        "{status:?} after {:?}",
        since.elapsed()
    );
    Ok(())
}

fn lock_without_registration_is_refused_at_once(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    let lock = range(&a, "one", 0, 0);
    expect(&mut client, &asked(lock, true), Status::Granted)?;
    // Another program of the host has taken the number: what is held can still be given back.
    let server = stage.server.as_ref().context("a server")?;
    server.locks().store(false, Ordering::Relaxed);
    expect(&mut client, &asked(lock, true), Status::NoLocks)?;
    expect(
        &mut client,
        &Args::Test {
            exclusive: true,
            lock,
        },
        Status::NoLocks,
    )?;
    expect(&mut client, &Args::Unlock { lock }, Status::Granted)?;
    expect(&mut client, &Args::Null, Status::Granted)?;
    server.locks().store(true, Ordering::Relaxed);
    let other = range(&a, "other", 0, 0);
    expect(&mut client, &asked(other, true), Status::Granted)
}

fn range_of_one_owner_is_denied_to_others(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let (mut second, _) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    expect(
        &mut client,
        &asked(range(&a, "one", 10, 10), true),
        Status::Granted,
    )?;
    // The same call again, as after a lost answer.
    expect(
        &mut client,
        &asked(range(&a, "one", 10, 10), true),
        Status::Granted,
    )?;
    for (offset, len, status) in [
        (0, 10, Status::Granted),
        (19, 1, Status::Denied),
        (0, 0, Status::Denied),
        (20, 0, Status::Granted),
    ] {
        let lock = range(&a, "two", offset, len);
        for exclusive in [false, true] {
            expect(&mut second, &Args::Test { exclusive, lock }, status)?;
            expect(&mut second, &asked(lock, exclusive), status)?;
        }
    }
    // Another process of the same client is another owner.
    let own = Lock {
        process: 8,
        ..range(&a, "one", 10, 1)
    };
    expect(&mut client, &asked(own, false), Status::Denied)?;
    expect(
        &mut client,
        &Args::Unlock {
            lock: range(&a, "one", 0, 0),
        },
        Status::Granted,
    )?;
    expect(&mut client, &asked(own, false), Status::Granted)?;
    expect(
        &mut second,
        &asked(range(&a, "two", 10, 1), false),
        Status::Granted,
    )?;
    // A connection that ends takes nothing along; a restart of its client does.
    drop(client);
    let (mut client, _) = stage.client()?;
    expect(
        &mut second,
        &asked(range(&a, "two", 10, 1), true),
        Status::Denied,
    )?;
    expect(
        &mut client,
        &Args::FreeAll { name: b"one" },
        Status::Granted,
    )?;
    expect(
        &mut second,
        &asked(range(&a, "two", 10, 1), true),
        Status::Granted,
    )
}

fn waiting_client_is_blocked_and_asks_again(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    expect(
        &mut client,
        &asked(range(&a, "one", 0, 0), true),
        Status::Granted,
    )?;
    let waiting = Args::Lock {
        block: true,
        exclusive: true,
        lock: range(&a, "two", 0, 0),
        reclaim: false,
        state: 1,
        monitored: true,
    };
    expect(&mut client, &waiting, Status::Blocked)?;
    expect(
        &mut client,
        &Args::Unlock {
            lock: range(&a, "one", 0, 0),
        },
        Status::Granted,
    )?;
    expect(&mut client, &waiting, Status::Granted)
}

fn lock_of_another_is_not_unlocked(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    let held = range(&a, "one", 0, 0);
    expect(&mut client, &asked(held, true), Status::Granted)?;
    let (mut hostile, _) = stage.client()?;
    for other in [
        Lock {
            caller: b"two",
            ..held
        },
        Lock {
            owner: b"8@host",
            ..held
        },
        Lock { process: 8, ..held },
    ] {
        expect(&mut hostile, &Args::Unlock { lock: other }, Status::Granted)?;
        expect(
            &mut hostile,
            &Args::FreeAll { name: b"two" },
            Status::Granted,
        )?;
    }
    expect(
        &mut hostile,
        &asked(range(&a, "two", 5, 1), false),
        Status::Denied,
    )
}

fn ranges_of_a_client_are_bounded(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let (a, b) = (
        file(&mut client, &root, "a")?,
        file(&mut client, &root, "b")?,
    );
    let mut granted = 0;
    let more = 100;
    for n in 0..(USER_RANGES_MAX + more) as u64 {
        let args = asked(range(&a, "one", 2 * n, 1), true);
        let status = nlm(&mut client, &args)?;
        let expected = [Status::Granted, Status::NoLocks][usize::from(granted == USER_RANGES_MAX)];
        ensure!(status == expected as u32, "{n}: {status}");
        granted += usize::from(status == 0);
    }
    ensure!(granted == USER_RANGES_MAX);
    expect(
        &mut client,
        &asked(range(&b, "one", 0, 0), true),
        Status::NoLocks,
    )?;
    expect(
        &mut client,
        &Args::Unlock {
            lock: range(&a, "one", 0, 0),
        },
        Status::Granted,
    )?;
    expect(
        &mut client,
        &asked(range(&b, "one", 0, 0), true),
        Status::Granted,
    )
}

fn absurd_ranges_and_names_are_refused(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    for (offset, len) in [
        (u64::MAX, 1),
        (u64::MAX, u64::MAX),
        (1, u64::MAX),
        (LAST, 2),
        (LAST + 1, 0),
    ] {
        let lock = range(&a, "one", offset, len);
        expect(&mut client, &asked(lock, true), Status::TooBig)?;
        expect(&mut client, &Args::Unlock { lock }, Status::TooBig)?;
        expect(
            &mut client,
            &Args::Test {
                exclusive: true,
                lock,
            },
            Status::TooBig,
        )?;
    }
    let long = "n".repeat(1024);
    let lock = Lock {
        owner: long.as_bytes(),
        ..range(&a, &long, LAST, 1)
    };
    expect(&mut client, &asked(lock, true), Status::Granted)?;
    let longer = "n".repeat(1025);
    ensure!(nlm(&mut client, &asked(range(&a, &longer, 0, 1), true)).is_err());
    // It is answered, and the connection stays.
    expect(
        &mut client,
        &asked(range(&a, "one", 0, 1), true),
        Status::Granted,
    )
}

fn handles_are_those_of_the_export(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    let mut forged = a.clone();
    *forged.last_mut().context("bytes")? ^= 1;
    let mut elsewhere = a.clone();
    elsewhere[2] ^= 1;
    let long = vec![1; 1024];
    for handle in [&forged[..], &elsewhere, &long, &[]] {
        expect(
            &mut client,
            &asked(range(handle, "one", 0, 1), true),
            Status::StaleHandle,
        )?;
        let lock = range(handle, "one", 0, 1);
        expect(&mut client, &Args::Unlock { lock }, Status::StaleHandle)?;
    }
    expect(
        &mut client,
        &asked(range(&root, "one", 0, 1), false),
        Status::Failed,
    )?;
    fs::remove_file(stage.dir().join("a"))?;
    expect(
        &mut client,
        &asked(range(&a, "one", 0, 1), true),
        Status::StaleHandle,
    )
}

fn store(stage: &Stage) -> Result<u64> {
    let identity = hearth_nfs::identity::Identity::load(&stage.state())?;
    Ok(identity.store)
}

fn read_only_client_locks_shared_only(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    let server = stage.server.as_ref().context("a server")?;
    let rights = Rights {
        write: false,
        ..ALL
    };
    server.set_access(
        store(&stage)?,
        Access::nobody().allow("127.0.0.1".parse()?, rights),
    );
    expect(
        &mut client,
        &asked(range(&a, "one", 0, 1), true),
        Status::ReadOnly,
    )?;
    expect(
        &mut client,
        &asked(range(&a, "one", 0, 1), false),
        Status::Granted,
    )
}

fn mode_of_a_file_limits_its_locks(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    for (mode, exclusive, status) in [
        (0o600, false, Status::Failed),
        (0o604, false, Status::Granted),
        (0o604, true, Status::Failed),
        (0o606, true, Status::Granted),
    ] {
        fs::set_permissions(stage.dir().join("a"), fs::Permissions::from_mode(mode))?;
        client.credential = user(4242);
        expect(
            &mut client,
            &asked(range(&a, "one", 0, 1), exclusive),
            status,
        )?;
    }
    // root without rights is anybody.
    let server = stage.server.as_ref().context("a server")?;
    let rights = Rights { root: false, ..ALL };
    server.set_access(
        store(&stage)?,
        Access::nobody().allow("127.0.0.1".parse()?, rights),
    );
    client.credential = crate::common::root();
    fs::set_permissions(stage.dir().join("a"), fs::Permissions::from_mode(0o600))?;
    expect(
        &mut client,
        &asked(range(&a, "one", 8, 1), true),
        Status::Failed,
    )
}

fn client_without_access_loses_its_locks(stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    expect(
        &mut client,
        &asked(range(&a, "one", 0, 1), true),
        Status::Granted,
    )?;
    let server = stage.server.as_ref().context("a server")?;
    let number = store(&stage)?;
    server.set_access(number, Access::nobody().allow("127.0.0.2".parse()?, ALL));
    expect(
        &mut client,
        &asked(range(&a, "one", 0, 1), true),
        Status::Failed,
    )?;
    server.set_access(number, Access::nobody().allow("127.0.0.0/8".parse()?, ALL));
    expect(
        &mut client,
        &asked(range(&a, "two", 0, 1), true),
        Status::Granted,
    )
}

fn killed_server_grants_only_reclaims(mut stage: Stage) -> Result<()> {
    let (mut client, root) = stage.client()?;
    let a = file(&mut client, &root, "a")?;
    expect(
        &mut client,
        &asked(range(&a, "one", 0, 1), true),
        Status::Granted,
    )?;
    // The process ends without a word to its locks.
    std::mem::forget(stage.server.take());
    stage.start()?;
    let (mut client, _) = stage.client()?;
    expect(
        &mut client,
        &asked(range(&a, "two", 0, 1), true),
        Status::GracePeriod,
    )?;
    expect(
        &mut client,
        &reclaimed(range(&a, "one", 0, 1)),
        Status::Granted,
    )?;
    expect(
        &mut client,
        &reclaimed(range(&a, "two", 0, 1)),
        Status::Denied,
    )?;
    expect(
        &mut client,
        &Args::Unlock {
            lock: range(&a, "one", 0, 1),
        },
        Status::Granted,
    )
}
