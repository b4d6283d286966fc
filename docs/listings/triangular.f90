program triangular                                 ! solves L X = B, and multiplies back
  use mpi
  implicit none
  integer, parameter :: n = 400, nrhs = 90, nb = 32
  integer :: iam, nprocs, ictxt, nprow, npcol, myrow, mycol, lld, np, nq, nqb
  integer :: i, j, ig, jg, info, desca(9), descb(9)
  integer, external :: numroc, indxl2g
  double precision :: worst
  double precision, allocatable :: a(:,:), b(:,:), x(:,:)

  call blacs_pinfo(iam, nprocs)
  call blacs_get(-1, 0, ictxt)
  call blacs_gridinit(ictxt, 'Row', 2, 2)
  call blacs_gridinfo(ictxt, nprow, npcol, myrow, mycol)
  if (myrow >= 0) then
    np  = numroc(n, nb, myrow, 0, nprow)
    nq  = numroc(n, nb, mycol, 0, npcol)
    nqb = numroc(nrhs, nb, mycol, 0, npcol)
    lld = max(1, np)
    call descinit(desca, n, n, nb, nb, 0, 0, ictxt, lld, info)
    call descinit(descb, n, nrhs, nb, nb, 0, 0, ictxt, lld, info)
    allocate(a(lld, nq), b(lld, nqb), x(lld, nqb))
    do j = 1, nq
      jg = indxl2g(j, nb, mycol, 0, npcol)
      do i = 1, np
        ig = indxl2g(i, nb, myrow, 0, nprow)
        a(i, j) = merge(dble(n), 1d0 / (ig + jg), ig == jg)
      end do
    end do
    b = 1
    x = b
    call pdtrsm('L', 'L', 'N', 'N', n, nrhs, 1d0, a, 1, 1, desca, x, 1, 1, descb)
    call pdtrmm('L', 'L', 'N', 'N', n, nrhs, 1d0, a, 1, 1, desca, x, 1, 1, descb)
    call pdgeadd('N', n, nrhs, -1d0, b, 1, 1, descb, 1d0, x, 1, 1, descb)
    worst = maxval(abs(x))
    call dgamx2d(ictxt, 'All', ' ', 1, 1, worst, 1, i, j, -1, -1, -1)
    if (iam == 0) print *, merge('L X = B holds', 'L X /= B     ', worst < 1d-12)
    call blacs_gridexit(ictxt)
  end if
  call blacs_exit(0)
end program
